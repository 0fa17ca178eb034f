"""Turns the documents of a conversation into parts that a model takes, before the conversation is rendered.

How many images a document becomes is known only once it was opened, and the template writes a placeholder for each. So
documents are found first, then fetched and inspected, and each is replaced by its pages, in its place:

    {"type": "file", "file": {...}, "pages": "1-2"}   ->   Pages((page 1, page 2))

A file that is no document becomes the image, video, audio or text that it is.
"""

from __future__ import annotations

import mimetypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from beheld.core.errors import (
    BeheldError,
    DecodeError,
    EngineError,
    LimitError,
    MediaError,
    ParamsError,
    PromptError,
    WorkerError,
)
from beheld.core.media import MediaRef, item_name
from beheld.inputs.fetch.fetch import MAX_URL, Fetched, FetchRules, fetch, is_data_url
from beheld.inputs.media import digest
from beheld.inputs.media.document import (
    DocumentFacts,
    DocumentKind,
    DocumentPage,
    PageWish,
    TextLayer,
    kind_of,
)

# Types of parts that hold a file of any kind; others are looked at only if they say that they hold a document.
_FILES = frozenset(("file", "input_file", "document", "document_url"))
_IMAGES = frozenset(("image", "image_url", "input_image"))
_ENDINGS = (".pdf", ".tif", ".tiff")
_DOCUMENT_TYPES = frozenset(("application/pdf", "application/x-pdf", "image/tiff"))
# How base64 of a PDF and of both kinds of TIFF begins.
_BASE64 = ("JVBER", "SUkqA", "TU0AK")
_OPTIONS = ("pages", "dpi", "text_layer")
# Keys of a part that name its file, and not options of the processor.
_OWN = frozenset((*_OPTIONS, *_FILES, *_IMAGES, "file_data", "file_url", "file_id", "filename", "url", "path", "data"))
# Those under which a file may stand.
_PLACES = ("file_data", "data", "file_url", "url", "path")
_MEDIA = frozenset(("audio", "image", "video"))
# Documents of one request, whatever they become: each is fetched and opened.
_MAX_DOCUMENTS = 100
_TEXTS = frozenset(("application/json", "application/xml", "application/yaml", "application/x-yaml"))


class Pages(tuple[Mapping[str, Any], ...]):
    """Parts that stand where a document stood.

    Attributes:
        place: the path of the document's part, for errors.
    """

    place: str

    @classmethod
    def of(cls, parts: Iterable[Mapping[str, Any]], place: str) -> Pages:
        """Make one."""
        made = cls(parts)
        made.place = place
        return made


@dataclass(frozen=True, eq=False)
class FoundDocument:
    """A part that holds a document, or a file of which only its bytes tell.

    Attributes:
        message, part: where it stands, from 0.
        ref: its file; the modality is "document".
        wish: what of it is wanted.
        filename, media_type: as the user gave them; empty if not.
        options: options of the processor, for each of its images.
    """

    message: int
    part: int
    ref: MediaRef
    wish: PageWish
    filename: str
    media_type: str
    options: Mapping[str, Any]


def find(messages: Any) -> tuple[FoundDocument, ...]:
    """Return the documents of a conversation, in order. What is malformed otherwise is left to chat.py.

    Raises:
        PromptError, ParamsError: a file is named in a way that is not known, or an option is wrong.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        return ()
    found: list[FoundDocument] = []
    for number, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list | tuple):
            continue
        for place, part in enumerate(content):
            if isinstance(part, Mapping):
                one = _found(part, number, place)
                if one is not None:
                    found.append(one)
    return tuple(found)


def _found(part: Mapping[str, Any], message: int, place: int) -> FoundDocument | None:
    kind = part.get("type")
    if kind is None:
        kind = next((name for name in (*_FILES, *_IMAGES) if name in part), None)
    if not isinstance(kind, str) or kind not in _FILES | _IMAGES:
        return None
    where = f"messages.{message}.content.{place}"
    source, filename = _source(part, kind, where)
    media_type = _media_type(source) or (mimetypes.guess_type(filename)[0] or "")
    if kind in _IMAGES and not _is_document(source, media_type):
        _check_none(part, where)
        return None
    try:
        wish = PageWish.of(part)
    except ParamsError as error:
        raise ParamsError(error.reason, error.remedy, param=f"{where}.{error.param}") from error
    options = {name: value for name, value in part.items() if name not in _OWN and name not in _NOT_OPTIONS}
    inner = part.get(_key(kind))
    uuid = inner.get("uuid", part.get("uuid")) if isinstance(inner, Mapping) else part.get("uuid")
    ref = MediaRef("document", source, uuid=None if uuid is None else str(uuid), place=f"{where}.{_key(kind)}")
    return FoundDocument(message, place, ref, wish, filename, media_type, options)


def _check_none(part: Mapping[str, Any], where: str) -> None:
    """Refuse options of documents for an image.

    Raises:
        ParamsError: there is one.
    """
    name = next((name for name in _OPTIONS if part.get(name) is not None), None)
    if name is not None:
        raise ParamsError(
            f"{name!r} is an option of documents, and nothing says that this image is one.",
            "Leave it out, or send the document as a part of the type 'file'.",
            param=f"{where}.{name}",
        )


_NOT_OPTIONS = frozenset(("type", "uuid", "detail", "format", "cache_control"))


def _key(kind: str) -> str:
    """Return under which name a part of that type holds its file."""
    return "image_url" if kind == "input_image" else kind


def _source(part: Mapping[str, Any], kind: str, where: str) -> tuple[Any, str]:
    """Return a part's file and its name."""
    inner = part.get(_key(kind))
    named = inner if isinstance(inner, Mapping) else part
    filename = named.get("filename")
    filename = filename if isinstance(filename, str) else ""
    if kind in _IMAGES:
        if inner is None and kind == "image":
            inner = next((part[name] for name in ("url", "path") if part.get(name) is not None), None)
        return (inner.get("url") if isinstance(inner, Mapping) else inner), filename
    if named.get("file_id") is not None:
        raise PromptError(
            "A file cannot be named by its file_id: nothing is stored here.",
            "Send its bytes as file_data, or its address as file_url.",
            param=f"{where}.file_id",
        )
    given = [name for name in _PLACES if named.get(name) is not None]
    if len(given) > 1:
        raise PromptError(
            f"Part {where} holds its file twice, under {given[0]!r} and {given[1]!r}.",
            "Leave one of them out.",
            param=f"{where}.{given[1]}",
        )
    data = next((named[name] for name in ("file_data", "data") if named.get(name) is not None), None)
    if isinstance(data, str) and not is_data_url(data):
        data = f"data:{mimetypes.guess_type(filename)[0] or ''};base64,{data}"
    url = next((named[name] for name in ("file_url", "url", "path") if named.get(name) is not None), None)
    source = data if data is not None else url
    if source is None and inner is not None and not isinstance(inner, Mapping):
        source = inner
    if not isinstance(source, str | Path | bytes | bytearray):
        raise PromptError(
            f"Part {where} holds no file.",
            'Write {"type": "file", "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,..."}}.',
            param=where,
        )
    return source, filename or _name_of(source)


def _name_of(source: Any) -> str:
    if isinstance(source, Path):
        return source.name
    if not isinstance(source, str) or is_data_url(source):
        return ""
    try:
        return urlsplit(source[:MAX_URL]).path.rpartition("/")[2]
    except ValueError:
        return ""


def _media_type(source: Any) -> str:
    """Return the type that a data URL names."""
    if not is_data_url(source):
        return ""
    return source[5:128].partition(",")[0].partition(";")[0].strip().lower()


def _is_document(source: Any, media_type: str) -> bool:
    """Return whether an image's source says that it is a document."""
    if isinstance(source, bytes | bytearray):
        return kind_of(bytes(source[:1024])) in (DocumentKind.PDF, DocumentKind.TIFF)
    if media_type in _DOCUMENT_TYPES:
        return True
    if is_data_url(source):
        return source[:192].partition("base64,")[2].startswith(_BASE64)
    return isinstance(source, str | Path) and _name_of(source).lower().endswith(_ENDINGS)


def files(found: Sequence[FoundDocument], rules: FetchRules) -> list[Fetched]:
    """Return the bytes of documents; those that are not fetched yet are fetched one after another.

    Raises:
        FetchError, LimitError, DecodeError: one cannot be had; the error names it.
    """
    made = []
    for number, one in enumerate(found, 1):
        try:
            made.append(_file(one.ref.source, rules))
        except MediaError as error:
            raise error.for_item(item_name("document", number), one.ref.place) from error
    return made


def _file(source: Any, rules: FetchRules) -> Fetched:
    if isinstance(source, str | Path):
        source = fetch(source, "document", rules)
    file = source if isinstance(source, Fetched) else Fetched(bytes(source), "bytes")
    if not file.data:
        raise DecodeError("The file has 0 bytes.", "Send the complete file.")
    if len(file.data) > rules.limits.max_item_bytes:
        raise LimitError(
            f"The file has {len(file.data)} bytes; the limit is {rules.limits.max_item_bytes}.", "Send a smaller one."
        )
    return file


def replaced(
    messages: Sequence[Mapping[str, Any]],
    found: Sequence[FoundDocument],
    fetched: Sequence[Fetched],
    modalities: Sequence[str],
    inspect: Callable[[bytes, PageWish], DocumentFacts],
) -> Sequence[Mapping[str, Any]]:
    """Return the conversation with each document's pages in its place.

    Args:
        messages: the conversation.
        found: its documents.
        fetched: their bytes.
        modalities: what the model takes.
        inspect: looks at the bytes of one.

    Raises:
        UserError, WorkerError: a document is at fault; the error names it.
    """
    made: list[dict[str, Any]] = [dict(message) for message in messages]
    for number, (one, file) in enumerate(zip(found, fetched, strict=True), 1):
        content = list(made[one.message]["content"])
        try:
            content[one.part] = Pages.of(_parts(one, file, modalities, inspect), one.ref.place or "")
        except BeheldError as error:
            if isinstance(error, EngineError) and not isinstance(error, WorkerError):
                raise
            own = f"messages.{one.message}.content.{one.part}.{error.param}"
            param = own if error.param in _OPTIONS else error.param
            raise _named(error, param).for_item(item_name("document", number), one.ref.place) from error
        made[one.message]["content"] = content
    return made


def _named(error: BeheldError, param: str | None) -> BeheldError:
    if param is None:
        return error
    return type(error)(error.reason, error.remedy, param=param, detail=error.detail, or_engine=error.or_engine)


def _parts(
    one: FoundDocument,
    file: Fetched,
    modalities: Sequence[str],
    inspect: Callable[[bytes, PageWish], DocumentFacts],
) -> Sequence[Mapping[str, Any]]:
    kind = kind_of(file.data)
    if kind is DocumentKind.OTHER:
        return _other(one, file)
    facts = inspect(file.data, one.wish)
    uuid = {} if one.ref.uuid is None else {"uuid": one.ref.uuid}
    if facts.kind is DocumentKind.OTHER:
        return _other(one, file)
    if facts.kind is DocumentKind.ANIMATION and "video" in modalities and not one.wish.pages:
        return ({"type": "video", "video": file, **uuid, **one.options},)
    key = digest.of_bytes(file.data, "document")
    parts: list[Mapping[str, Any]] = []
    for index in range(max(len(facts.pages), len(facts.texts))):
        if facts.texts and facts.texts[index]:
            parts.append({"type": "text", "text": facts.texts[index]})
        if facts.pages:
            page = DocumentPage(file.data, file.source, key, facts.pages[index], 0.0 if index else file.milliseconds)
            parts.append({"type": "image", "image": page, **uuid, **one.options})
    if not parts:
        raise DecodeError("The pages of the PDF hold no text.", "Leave text_layer out, so that its images are read.")
    return parts


def _other(one: FoundDocument, file: Fetched) -> Sequence[Mapping[str, Any]]:
    """Return the part of a file that is no document: media, or text."""
    given = {name: value for name, value in zip(_OPTIONS, _values(one.wish), strict=True) if value}
    modality = _modality(file.data) or (one.media_type.partition("/")[0] if one.media_type else "")
    is_text = modality == "text" or _is_text(one.media_type)
    if modality not in _MEDIA and is_text:
        # Its text is wanted in any case.
        given.pop("text_layer", None)
        modality = "text"
    if given and modality:
        raise ParamsError(
            f"{next(iter(given))!r} is an option of documents, and this is of the kind {modality}.",
            "Leave it out.",
            param=next(iter(given)),
        )
    if modality in _MEDIA:
        uuid = {} if one.ref.uuid is None else {"uuid": one.ref.uuid}
        return ({"type": modality, modality: file, **uuid, **one.options},)
    if is_text:
        try:
            return ({"type": "text", "text": file.data.decode("utf-8-sig")},)
        except UnicodeDecodeError as error:
            raise DecodeError("The text file is not in UTF-8.", "Save it in UTF-8.") from error
    raise DecodeError(
        "The file is of no kind that can be read.",
        "Send a PDF, a TIFF, an image, a video, audio, or text with a filename that says so.",
    )


def _is_text(media_type: str) -> bool:
    return media_type.startswith("text/") or media_type in _TEXTS


def _values(wish: PageWish) -> tuple[Any, Any, Any]:
    return wish.pages, wish.dpi, wish.text is not TextLayer.NONE


def _modality(data: bytes) -> str:
    """Return the modality that a file's first bytes tell; "" if they leave it open."""
    if data[:8] == b"\x89PNG\r\n\x1a\n" or data[:3] in (b"\xff\xd8\xff", b"GIF") or data[:2] == b"BM":
        return "image"
    if data[:4] == b"RIFF":
        return {b"WEBP": "image", b"WAVE": "audio", b"AVI ": "video"}.get(data[8:12], "")
    if data[:4] in (b"fLaC",) or data[:3] == b"ID3":
        return "audio"
    return ""


def check_count(found: Sequence[FoundDocument], modalities: Sequence[str], limit: int) -> None:
    """Refuse documents, before any is fetched, that are too many, or whose images are more than the model takes.

    Raises:
        PromptError: the model takes no images.
        LimitError: there are more documents than images may be in a request, or than may be opened.
    """
    if len(found) > max(_MAX_DOCUMENTS, limit):
        raise LimitError(
            f"There are {len(found)} files; the limit is {max(_MAX_DOCUMENTS, limit)}.",
            "Send fewer in one request.",
            param=found[max(_MAX_DOCUMENTS, limit)].ref.place,
        )
    # What its name or type calls a text is one; if its bytes say otherwise, it is checked once it was opened.
    images = [one for one in found if one.wish.text is not TextLayer.ONLY and not _is_text(one.media_type)]
    if images and not modalities:
        raise PromptError(
            "This model does not accept documents; it takes text input only.",
            "Send PDFs with text_layer: 'only', or their text.",
            param=images[0].ref.place,
        )
    if len(images) > max(1, limit):
        raise LimitError(
            f"There are {len(images)} documents; limit_mm_per_prompt allows {limit} images.",
            "Send fewer.",
            param=images[limit].ref.place,
            or_engine="raise limit_mm_per_prompt",
        )
