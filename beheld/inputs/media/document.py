"""Reads documents and animated images page by page: PDF, TIFF, and GIF, WebP and PNG with several frames.

A document is inspected first: what it is, how many pages it has and how large they are, from its headers. Then each
wanted page is an image of its own, which is rendered when it is decoded. Both read untrusted data, so they run in a
worker's process if there is one.
"""

from __future__ import annotations

import importlib
import io
import math
import threading
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from beheld.core.config import MediaLimits
from beheld.core.errors import DecodeError, LimitError, ParamsError, first_line
from beheld.inputs.media import animation, decode, header

DEFAULT_DPI = 144
_MAX_DPI = 1200
# Points per inch, PDF's unit of length.
_POINTS = 72
# Letters of the text layer of one document.
_MAX_LETTERS = 1 << 20
# Pages that a TIFF's chain of headers may have: each costs a read to count.
_MAX_CHAIN = 10_000
# Frames of an animated image that become images, where a model takes no video and nobody chose some.
_FRAMES_AS_IMAGES = 8
_RANGES = 64
# PDFium is not thread-safe.
_PDFIUM = threading.Lock()


class DocumentKind(StrEnum):
    """What a document is made of."""

    PDF = "PDF"
    TIFF = "TIFF"
    ANIMATION = "animation"
    # Something else: an image, a video, a text. It is no document.
    OTHER = "other"


class TextLayer(StrEnum):
    """Whether the text that a PDF holds goes into the prompt: not at all, before each page's image, or in its place."""

    NONE = "none"
    ADDED = "added"
    ONLY = "only"


@dataclass(frozen=True)
class PageWish:
    """What of a document is wanted.

    Attributes:
        pages: page numbers from 1, as in "1-3,7,10-"; empty for all.
        dpi: dots per inch of a PDF's pages; None for DEFAULT_DPI.
        text: whether its text goes into the prompt.
    """

    pages: str = ""
    dpi: float | None = None
    text: TextLayer = TextLayer.NONE

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> PageWish:
        """Parse the options `pages`, `dpi` and `text_layer` of a message's part.

        Raises:
            ParamsError: one is malformed or out of range.
        """
        pages, dpi, text = options.get("pages"), options.get("dpi"), options.get("text_layer")
        if isinstance(pages, int) and not isinstance(pages, bool):
            pages = str(pages)
        if pages is not None and not isinstance(pages, str):
            raise _wrong_pages(pages)
        if dpi is not None and (isinstance(dpi, bool) or not isinstance(dpi, int | float) or not 1 <= dpi <= _MAX_DPI):
            raise ParamsError(f"dpi must be a number from 1 to {_MAX_DPI}, got {dpi!r}.", param="dpi")
        texts = {None: TextLayer.NONE, False: TextLayer.NONE, True: TextLayer.ADDED, "only": TextLayer.ONLY}
        if not isinstance(text, bool | str | None) or text not in texts:
            raise ParamsError(f"text_layer must be true, false or 'only', got {text!r}.", param="text_layer")
        wish = cls(pages or "", None if dpi is None else float(dpi), texts[text])
        wish.ranges()
        return wish

    def ranges(self) -> tuple[tuple[int, int | None], ...]:
        """Return the wanted ranges of page numbers, from 1 and with their ends; None for the last page.

        Raises:
            ParamsError: they are malformed.
        """
        if not self.pages.strip():
            return ((1, None),)
        made: list[tuple[int, int | None]] = []
        pieces = self.pages.split(",", _RANGES)
        if len(pieces) > _RANGES:
            raise _wrong_pages(self.pages)
        for piece in pieces:
            first, dash, last = (word.strip() for word in piece.partition("-"))
            if not _is_number(first) or (last and not _is_number(last)):
                raise _wrong_pages(self.pages)
            stop = int(last) if last else (None if dash else int(first))
            if stop is not None and stop < int(first):
                raise _wrong_pages(self.pages)
            made.append((int(first), stop))
        return tuple(made)

    def chosen(self, count: int, most: int) -> tuple[int, ...]:
        """Return the indices of the wanted pages of `count`, from 0, in the order in which they are named.

        Raises:
            ParamsError: there is no such page.
            LimitError: there are more than `most`.
        """
        made: list[int] = []
        for first, last in self.ranges():
            stop = count if last is None else last
            if max(first, stop) > count:
                raise ParamsError(
                    f"The document has {count} pages, and pages names page {max(first, stop)}.",
                    f"Name pages from 1 to {count}.",
                    param="pages",
                )
            if len(made) + stop - first + 1 > most:
                wanted = sum((count if end is None else end) - begin + 1 for begin, end in self.ranges())
                raise LimitError(
                    f"{wanted} of the document's {count} pages are wanted; the limit is {most}.",
                    f"Choose some, as in pages: '1-{most}'.",
                    or_engine="raise max_pages of media_limits",
                )
            made += range(first - 1, stop)
        return tuple(made)


def _is_number(word: str) -> bool:
    return word.isascii() and word.isdigit() and 0 < len(word) <= 9 and int(word) > 0


def _wrong_pages(given: Any) -> ParamsError:
    shown = repr(given)[:64]
    return ParamsError(
        f"pages must name page numbers from 1, got {shown}.", "Write for example '1-3,7' or '10-'.", param="pages"
    )


@dataclass(frozen=True)
class PageChoice:
    """One page of a document, to be decoded as an image.

    Attributes:
        kind: the document's.
        index: the page's, from 0.
        count: how many pages the document has.
        width, height: in pixels, as the file's headers state them before the page is decoded.
        dpi: of a PDF's page; None for others.
        time_s: of an animated image's frame: when it is shown; None for others.
        lost: what the choice of pages lost, for the receipt.
    """

    kind: DocumentKind
    index: int
    count: int
    width: int
    height: int
    dpi: float | None = None
    time_s: float | None = None
    lost: tuple[str, ...] = ()

    def key(self) -> list[Any]:
        """Return what tells this page's pixels from others of the same document."""
        return [str(self.kind), self.index, self.dpi]

    def described(self) -> dict[str, Any]:
        """Describe the page for receipts; page numbers count from 1."""
        if self.kind is DocumentKind.ANIMATION:
            return {"frame": self.index + 1, "frames": self.count, "time_s": self.time_s}
        facts: dict[str, Any] = {"page": self.index + 1, "pages": self.count}
        return facts if self.dpi is None else facts | {"dpi": self.dpi}


@dataclass(frozen=True)
class DocumentFacts:
    """What inspection found.

    Attributes:
        kind: what it is.
        pages: the wanted pages; empty if it is no document.
        texts: the text of each wanted page, if it was asked for.
    """

    kind: DocumentKind
    pages: tuple[PageChoice, ...] = ()
    texts: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class DocumentPage:
    """A page as the source of an image.

    Attributes:
        data: the document's bytes.
        origin: where they came from, for receipts: "data URL", "url", "path" or "bytes".
        digest: of the document's bytes.
        choice: which page.
        milliseconds: spent fetching, counted for the first page.
    """

    data: bytes = field(repr=False)
    origin: str
    digest: bytes = field(repr=False)
    choice: PageChoice
    milliseconds: float = 0.0


def kind_of(data: bytes) -> DocumentKind:
    """Return what these bytes begin like; an animated image may turn out to have one frame."""
    if header.is_pdf(data):
        return DocumentKind.PDF
    if header.is_tiff(data):
        return DocumentKind.TIFF
    return DocumentKind.ANIMATION if animation.may_be(data) else DocumentKind.OTHER


def inspect(data: bytes, wish: PageWish, limits: MediaLimits) -> DocumentFacts:
    """Look at a document without rendering any page; its text is read if it is wanted.

    Raises:
        DecodeError: it is broken or encrypted.
        LimitError: too many pages or pixels.
        ParamsError: there is no such page, or an option has no meaning for it.
    """
    kind = kind_of(data)
    if kind is DocumentKind.PDF:
        return _inspected_pdf(data, wish, limits)
    if wish.text is not TextLayer.NONE:
        raise ParamsError("Only PDFs have a text layer.", "Leave text_layer out.", param="text_layer")
    if wish.dpi is not None:
        raise ParamsError(
            "Only a PDF's pages are rendered at a dpi; this file has pixels of its own.",
            "Leave dpi out.",
            param="dpi",
        )
    if kind is DocumentKind.TIFF:
        return _inspected_tiff(data, wish, limits)
    if kind is DocumentKind.ANIMATION:
        return _inspected_animation(data, wish, limits)
    return DocumentFacts(DocumentKind.OTHER)


def page_image(data: bytes, choice: PageChoice, limits: MediaLimits) -> decode.DecodedImage:
    """Decode one page.

    Raises:
        DecodeError: it is broken.
        LimitError: too many pixels.
    """
    if choice.kind is DocumentKind.PDF:
        page = decode.from_pil(_rendered(data, choice, limits), limits, "PDF")
    elif choice.kind is DocumentKind.TIFF:
        with _tiff(data) as image:
            _seek(image, choice.index)
            decode.check_size(image.width, image.height, limits)
            page = decode.from_pil(_alone(image), limits, "TIFF")
    else:
        frame, form = animation.frame(data, choice.index, limits)
        page = decode.from_pil(frame, limits, form)
    return replace(page, given={**page.given, **choice.described()}, lost=(*choice.lost, *page.lost))


def _checked(pages: Iterable[PageChoice], limits: MediaLimits) -> tuple[PageChoice, ...]:
    """Check the pages' sizes, one by one and in all."""
    made: list[PageChoice] = []
    pixels = 0
    for page in pages:
        at = "" if page.dpi is None else f" at {page.dpi:g} dpi"
        lower = "Ask for other pages." if page.dpi is None else "Ask for a lower dpi, or for other pages."
        if page.width < 1 or page.height < 1:
            raise DecodeError(f"Page {page.index + 1} is empty.", "Choose other pages.")
        if page.width * page.height > limits.max_pixels:
            raise LimitError(
                f"Page {page.index + 1} has {page.width} x {page.height} pixels{at}; the limit is {limits.max_pixels}.",
                lower,
            )
        pixels += page.width * page.height
        if 3 * pixels > limits.max_decoded_bytes:
            raise LimitError(
                f"The pages up to page {page.index + 1} take {3 * pixels} bytes{at}; "
                f"the limit is {limits.max_decoded_bytes}.",
                lower if page.dpi is None else "Ask for a lower dpi, or for fewer pages.",
            )
        made.append(page)
    return tuple(made)


# ---------------------------------------------------------------------- PDF


def _pdfium() -> Any:
    try:
        return importlib.import_module("pypdfium2")
    except ImportError as error:
        raise DecodeError(
            "PDFs are read with pypdfium2, which is not installed here.",
            "Send the pages as images.",
            or_engine="install pypdfium2",
        ) from error


def _opened_pdf(library: Any, data: bytes) -> Any:
    try:
        return library.PdfDocument(data)
    except library.PdfiumError as error:
        detail = first_line(error)
        if "password" in detail.lower() or "security" in detail.lower():
            raise DecodeError(
                "The PDF is encrypted and needs a password.", "Save it without one, and send that."
            ) from error
        raise DecodeError(
            "The PDF is broken.", "Send the complete file, or save it again with another program.", detail=detail
        ) from error


def _inspected_pdf(data: bytes, wish: PageWish, limits: MediaLimits) -> DocumentFacts:
    library = _pdfium()
    with _PDFIUM, closing(_opened_pdf(library, data)) as document:
        count = len(document)
        if count < 1:
            raise DecodeError("The PDF has no pages.", "Send the complete file.")
        indices = wish.chosen(count, limits.max_pages)
        dpi = DEFAULT_DPI if wish.dpi is None else wish.dpi
        pages = () if wish.text is TextLayer.ONLY else _checked(_sized(library, document, indices, dpi), limits)
        texts = () if wish.text is TextLayer.NONE else _texts(library, document, indices)
    return DocumentFacts(DocumentKind.PDF, pages, texts)


def _sized(library: Any, document: Any, indices: Iterable[int], dpi: float) -> Iterable[PageChoice]:
    for index in indices:
        try:
            width, height = document.get_page_size(index)
        except library.PdfiumError as error:
            raise _broken_page(index, error) from error
        sides = [math.ceil(side * dpi / _POINTS) if math.isfinite(side) else 0 for side in (width, height)]
        yield PageChoice(DocumentKind.PDF, index, len(document), sides[0], sides[1], dpi)


def _texts(library: Any, document: Any, indices: Iterable[int]) -> tuple[str, ...]:
    made: list[str] = []
    left = _MAX_LETTERS
    for index in indices:
        try:
            with closing(document[index]) as page, closing(page.get_textpage()) as layer:
                count = layer.count_chars()
                text = layer.get_text_bounded() if count <= left else ""
        except library.PdfiumError as error:
            raise _broken_page(index, error) from error
        left -= max(count, len(text))
        if left < 0:
            raise LimitError(
                f"The text up to page {index + 1} has more than {_MAX_LETTERS} letters.", "Choose fewer pages."
            )
        # PDFium writes a line's end as two letters, and gives letters without a code as they are.
        plain = text.replace("\r\n", "\n").replace("\0", "").encode("utf-8", "ignore").decode()
        made.append(plain.strip())
    return tuple(made)


def _rendered(data: bytes, choice: PageChoice, limits: MediaLimits) -> Any:
    assert choice.dpi is not None
    library = _pdfium()
    with _PDFIUM, closing(_opened_pdf(library, data)) as document:
        try:
            with closing(document[choice.index]) as page:
                # What is rendered is what the page says now; its size was checked when it was inspected.
                sides = [math.ceil(side * choice.dpi / _POINTS) for side in page.get_size()]
                decode.check_size(sides[0], sides[1], limits)
                with closing(page.render(scale=choice.dpi / _POINTS)) as bitmap:
                    return bitmap.to_pil().convert("RGB")
        except library.PdfiumError as error:
            raise _broken_page(choice.index, error) from error


def _broken_page(index: int, error: Exception) -> DecodeError:
    return DecodeError(
        f"Page {index + 1} of the PDF is broken.",
        "Choose other pages, or save the PDF again with another program.",
        detail=first_line(error),
    )


# ---------------------------------------------------------------------- TIFF


def _tiff(data: bytes) -> Any:
    from PIL import Image

    try:
        return Image.open(io.BytesIO(data), formats=("TIFF",))
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise LimitError("The first page has too many pixels.", "Shrink it first.") from error
    except Exception as error:
        raise DecodeError("The TIFF is broken.", "Send the complete file.", detail=first_line(error)) from error


def _seek(image: Any, index: int) -> None:
    try:
        image.seek(index)
    except Exception as error:
        # On broken bytes Pillow raises exceptions of any kind.
        raise DecodeError(
            f"Page {index + 1} of the TIFF is broken.", "Send the complete file.", detail=first_line(error)
        ) from error


def _alone(image: Any) -> Any:
    """Return the page that an image file stands at, as an image that has no others."""
    try:
        image.load()
        return image.copy()
    except MemoryError:
        raise
    except Exception as error:
        raise DecodeError("The page is broken.", "Send the complete file.", detail=first_line(error)) from error


def _inspected_tiff(data: bytes, wish: PageWish, limits: MediaLimits) -> DocumentFacts:
    with _tiff(data) as image:
        sizes = [image.size]
        while True:
            try:
                image.seek(len(sizes))
            except EOFError:
                break
            except Exception as error:
                raise DecodeError(
                    f"Page {len(sizes) + 1} of the TIFF is broken.", "Send the complete file.", detail=first_line(error)
                ) from error
            sizes.append(image.size)
            if len(sizes) > _MAX_CHAIN:
                raise LimitError(f"The TIFF has more than {_MAX_CHAIN} pages.", "Cut it first.")
    indices = wish.chosen(len(sizes), limits.max_pages)
    pages = (PageChoice(DocumentKind.TIFF, index, len(sizes), *sizes[index]) for index in indices)
    return DocumentFacts(DocumentKind.TIFF, _checked(pages, limits))


# ---------------------------------------------------------------------- animations


def _inspected_animation(data: bytes, wish: PageWish, limits: MediaLimits) -> DocumentFacts:
    """Inspect an animated image; one with a single frame is an image, and no document."""
    found = animation.timeline(data, limits)
    if found is None:
        return DocumentFacts(DocumentKind.OTHER)
    count = len(found.starts_ms)
    lost: tuple[str, ...] = ()
    if wish.pages.strip() or count <= _FRAMES_AS_IMAGES:
        indices = wish.chosen(count, limits.max_pages)
    else:
        indices = tuple(place * (count - 1) // (_FRAMES_AS_IMAGES - 1) for place in range(_FRAMES_AS_IMAGES))
        lost = (f"{count - len(indices)} of {count} frames of the animated image were not used",)
    pages = (
        PageChoice(
            DocumentKind.ANIMATION,
            index,
            count,
            *found.size,
            time_s=found.starts_ms[index] / 1000,
            lost=lost if index == indices[0] else (),
        )
        for index in indices
    )
    return DocumentFacts(DocumentKind.ANIMATION, _checked(pages, limits))
