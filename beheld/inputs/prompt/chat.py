"""Turns OpenAI messages into template input and the media they contain, in order.

Users' strings never become control tokens: see special_tokens.py. If a template takes content as a string, each item's
placeholder is inserted in the text at the item's place.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from beheld.core.config import MediaLimits
from beheld.core.errors import MediaError, PromptError
from beheld.core.media import AUDIO_IN_VIDEO, MediaRef, item_name
from beheld.core.value_checks import nearest
from beheld.inputs.fetch.fetch import is_data_url
from beheld.inputs.media import embeds
from beheld.inputs.prompt import embedded_prompt
from beheld.inputs.prompt.documents import Pages
from beheld.inputs.prompt.special_tokens import ControlTokens, StandIns, private_letters
from beheld.utils.bounded_json import JsonBounds, JsonError, NotJsonError, check_counts, parse_cut_off
from beheld.utils.part_fields import PartFields

_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}", re.ASCII)
_ROLES = frozenset(("system", "user", "assistant", "tool", "developer", "function", "model", "ipython"))
_MEDIA_TYPES = {
    "image": "image",
    "image_url": "image",
    "image_pil": "image",
    "input_image": "image",
    "image_embeds": "image",
    "audio_embeds": "audio",
    "video_embeds": "video",
    "video": "video",
    "video_url": "video",
    "input_video": "video",
    "audio": "audio",
    "audio_url": "audio",
    "input_audio": "audio",
}
# The entries of a part of embeddings, its type aside.
_OF_EMBEDS = (embedded_prompt.DATA, "cache_control")
# The fields of an assistant's reasoning. Templates read one of them, whichever a client sends.
_REASONING = ("reasoning", "reasoning_content")
_TEXT_TYPES = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
# Keys that may hold the item, in parts named after the modality.
_SOURCES = ("url", "path", "base64", "data")
# The limit on arguments of all tool calls of a conversation, which are JSON within JSON.
_ARGUMENTS = JsonBounds()
_NOT_OPTIONS = frozenset(("type", "uuid", "detail", "format"))
# Keys of parts whose texts are no letters of a prompt.
_HOLDING = frozenset((*_MEDIA_TYPES, *_SOURCES, *_NOT_OPTIONS, embedded_prompt.KEY, "file_data", "file_url"))
# Letters of a text that a part has for the template.
_MAX_DESCRIBED = 1024


@dataclass(frozen=True, eq=False)
class Slot:
    """Embeddings in place of a text, as the user gave them.

    Attributes:
        value: what the part holds.
        param: its field in errors.
        optional: whether the template may leave it out, as it leaves out earlier reasoning.
    """

    value: Any
    param: str
    optional: bool


class _Slots:
    """Embeddings of a conversation, by the letters that stand for them."""

    def __init__(self, stand_ins: StandIns) -> None:
        self._stand_ins = stand_ins
        self.by_letter: dict[str, Slot] = {}

    def add(self, part: Mapping[str, Any], param: str, *, optional: bool) -> str:
        """Return the letter for the embeddings of a part.

        Raises:
            PromptError: it holds none, or something else as well.
        """
        for name in part:
            if name not in (*_OF_EMBEDS, "type"):
                name = name[:64]
                raise PromptError(
                    f"A part of embeddings has no {name!r} besides.", "Leave it out.", param=f"{param}.{name}"
                )
        place = f"{param}.{embedded_prompt.DATA}"
        if part.get(embedded_prompt.DATA) is None:
            remedy = f'Write {{"type": "{embedded_prompt.KEY}", "{embedded_prompt.DATA}": ...}}.'
            raise PromptError(f"{param} holds no embeddings.", remedy, param=place)
        letter = self._stand_ins.slot()
        self.by_letter[letter] = Slot(part[embedded_prompt.DATA], place, optional)
        return letter


@dataclass(frozen=True)
class ParsedChat:
    """Messages for a template, and their media in text order. `slots` are their embeddings, by the letters for them."""

    messages: tuple[Mapping[str, Any], ...]
    media: tuple[MediaRef, ...]
    stand_ins: StandIns
    slots: Mapping[str, Slot]


@dataclass(frozen=True)
class _Spot:
    """A part's place; `message` and `part` count from 1."""

    message: int
    part: int

    def __str__(self) -> str:
        return f"Part {self.part} of message {self.message}"

    @property
    def path(self) -> str:
        """Return its field name in errors, counted from 0."""
        return f"messages.{self.message - 1}.content.{self.part - 1}"


@dataclass(frozen=True)
class ItemPart:
    """An item's place among a message's parts.

    Attributes:
        modality: the item's.
        number: the item's among those of its modality in the conversation, from 1.
        described: what the message says of it: key -> value. See FamilyInputs.described_by.
    """

    modality: str
    number: int
    described: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DescribedText:
    """A text, and the further entries of its part: key -> value."""

    text: str
    described: Mapping[str, Any]


Part = str | DescribedText | ItemPart


@dataclass(frozen=True)
class ChatForm:
    """The message form that a template takes.

    Attributes:
        as_list: whether content is a list of parts; otherwise a string.
        strings_too: whether string content may stay a string.
        placeholder: (modality, number) -> the text of an item in a string.
        described_by: keys of media parts that the template reads; see FamilyInputs.described_by.
        fields: further keys of parts that it reads.
    """

    as_list: bool
    strings_too: bool
    placeholder: Callable[[str, int], str]
    described_by: frozenset[str] = frozenset()
    fields: PartFields = field(default_factory=PartFields)


def read(
    messages: Sequence[Mapping[str, Any]], form: ChatForm, control: ControlTokens, limits: MediaLimits
) -> ParsedChat:
    """Convert messages to the template's form, with control token spellings replaced by stand-ins.

    Raises:
        PromptError: a message or a part is malformed or of an unknown kind.
        DecodeError: embeddings in a part are malformed.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise PromptError(
            "There are no messages.", 'Give a list such as [{"role": "user", "content": "..."}].', param="messages"
        )
    try:
        check_counts([arguments for message in messages for arguments in _arguments(message)], _ARGUMENTS)
    except JsonError as error:
        raise PromptError(f"The arguments of tool calls: {error.reason}", error.remedy, param="messages") from error
    stand_ins = StandIns(_private_letters(messages))
    media: list[MediaRef] = []
    slots = _Slots(stand_ins)
    out: list[Mapping[str, Any]] = []
    for number, message in enumerate(messages, 1):
        if not isinstance(message, Mapping):
            raise PromptError(
                f"Message {number} is not a mapping.", 'Write {"role": ..., "content": ...}.', param=_field(number)
            )
        out.append(_message(message, number, form, control, stand_ins, media, slots, limits))
    return ParsedChat(tuple(_broken_across(out, control, stand_ins)), tuple(media), stand_ins, slots.by_letter)


def sanitized(value: Any, control: ControlTokens, stand_ins: StandIns) -> Any:
    """Return a value of plain JSON types with control token spellings in every string and key replaced by stand-ins."""
    if isinstance(value, str):
        return stand_ins.replace(value, control)
    if isinstance(value, Mapping):
        return {
            stand_ins.replace(k, control) if isinstance(k, str) else k: sanitized(v, control, stand_ins)
            for k, v in value.items()
        }
    if isinstance(value, list | tuple):
        return [sanitized(entry, control, stand_ins) for entry in value]
    return value


def num_letters(messages: Any) -> int:
    """Count the characters of all messages, without media."""
    if isinstance(messages, str):
        return len(messages)
    if isinstance(messages, Mapping):
        if messages.get("type", "text") not in (*_TEXT_TYPES, "function"):
            return sum(
                len(value) for name, value in messages.items() if name not in _HOLDING and isinstance(value, str)
            )
        return sum(map(num_letters, messages.values()))
    return sum(map(num_letters, messages)) if isinstance(messages, list | tuple) else 0


def _private_letters(value: Any) -> set[str]:
    """Return the private-use characters of all strings; stand-ins are chosen from the others. Media are ASCII."""
    if isinstance(value, str):
        return set() if value.isascii() else private_letters(value)
    if isinstance(value, Mapping):
        return set().union(*(_private_letters(k) | _private_letters(v) for k, v in value.items())) if value else set()
    if isinstance(value, list | tuple):
        return set().union(*map(_private_letters, value)) if value else set()
    return set()


def _message(
    message: Mapping[str, Any],
    number: int,
    form: ChatForm,
    control: ControlTokens,
    stand_ins: StandIns,
    media: list[MediaRef],
    slots: _Slots,
    limits: MediaLimits,
) -> Mapping[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or _ROLE.fullmatch(role) is None:
        raise PromptError(
            f"Message {number} has the role {role!r}.",
            "Use a word such as 'system', 'user' or 'assistant'.",
            param=_field(number, "role"),
        )
    if role not in _ROLES and any(role in spelling for spelling in control.ids):
        raise PromptError(
            f"The role {role!r} of message {number} is part of a control token.",
            "Use another role.",
            param=_field(number, "role"),
        )
    rest = {k: _extra(k, v, number) for k, v in message.items() if k not in ("role", "content")}
    rest |= _reasoning(rest, number, slots)
    out = {"role": role, **sanitized(rest, control, stand_ins)}
    content = message.get("content")
    if isinstance(content, str) and (form.strings_too or not form.as_list):
        return {**out, "content": stand_ins.replace(content, control)}
    if content is None:
        return {**out, "content": content if "tool_calls" in message else ""}
    parts = _parts(content, number, media, slots, limits, form)
    safe = _replace_across(parts, control, stand_ins)
    return {**out, "content": _as_list(safe) if form.as_list else _as_string(safe, form)}


def _reasoning(message: Mapping[str, Any], number: int, slots: _Slots) -> dict[str, Any]:
    """Return the fields of a message's reasoning, each of which templates may read, with letters for embeddings."""
    given = {name: message[name] for name in _REASONING if message.get(name) is not None}
    for name, value in given.items():
        if isinstance(value, Mapping) and value.get("type") == embedded_prompt.KEY:
            given[name] = slots.add(value, _field(number, name), optional=True)
    if len(given) == 1:
        return dict.fromkeys(_REASONING, *given.values())
    return given


def _field(number: int, *path: str | int) -> str:
    """Return the name of a message's field in errors; `number` counts from 1."""
    return ".".join(map(str, ("messages", number - 1, *path)))


def _arguments(message: Any) -> list[str]:
    """Return the arguments of a message's tool calls that came as JSON text."""
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    functions = [call.get("function") for call in calls if isinstance(call, Mapping)] if isinstance(calls, list) else []
    found = [function.get("arguments") for function in functions if isinstance(function, Mapping)]
    return [arguments for arguments in found if isinstance(arguments, str)]


def _extra(name: str, value: Any, number: int) -> Any:
    """Parse the arguments of tool calls: JSON text in messages, objects in templates.

    An answer that was cut off, or a small model, leaves text that is no JSON: what is complete of an object is read,
    and any other text stays as it is, so that a conversation goes on with the messages that the server sent.
    """
    if name != "tool_calls" or not isinstance(value, list):
        return value
    calls = []
    for place, call in enumerate(value):
        function = call.get("function") if isinstance(call, Mapping) else None
        arguments = function.get("arguments") if isinstance(function, Mapping) else None
        if isinstance(function, Mapping) and isinstance(arguments, str):
            try:
                call = {**call, "function": {**function, "arguments": parse_cut_off(arguments or "{}", _ARGUMENTS)}}
            except NotJsonError:
                pass
            except JsonError as error:
                raise PromptError(
                    f"The arguments of a tool call: {error.reason}",
                    error.remedy,
                    param=_field(number, name, place, "function", "arguments"),
                ) from error
        calls.append(call)
    return calls


def _parts(
    content: Any, number: int, media: list[MediaRef], slots: _Slots, limits: MediaLimits, form: ChatForm
) -> list[Part]:
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list | tuple):
        raise PromptError(
            f"The content of message {number} is neither text nor a list of parts.",
            "Send one of the two.",
            param=_field(number, "content"),
        )
    parts: list[Part] = []
    for index, part in enumerate(content, 1):
        where = _Spot(number, index)
        if isinstance(part, Pages):
            parts += [_part(page, where, media, slots, limits, form, part.place) for page in part]
        else:
            made = _part(part, where, media, slots, limits, form)
            if isinstance(made, ItemPart) and media[-1].of_video is not None:
                # The video's placeholder stands for both.
                continue
            parts.append(made)
    return parts


def _part(
    part: Any,
    where: _Spot,
    media: list[MediaRef],
    slots: _Slots,
    limits: MediaLimits,
    form: ChatForm,
    place: str | None = None,
) -> Part:
    """Return one part; an item's is added to `media`. `place` is the item's in errors, if it is not its own."""
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise PromptError(
            f"{where} is not a mapping.", 'Write for example {"type": "text", "text": ...}.', param=where.path
        )
    kind = _kind(part, where)
    if kind in _TEXT_TYPES:
        text = part.get(_TEXT_TYPES[kind])
        if not isinstance(text, str):
            raise PromptError(f"{where} has no text.", 'Write {"type": "text", "text": ...}.', param=where.path)
        said = _described(part, where, form)
        return DescribedText(text, said) if said else text
    if kind == embedded_prompt.KEY:
        return slots.add(part, where.path, optional=False)
    described = _described(part, where, form)
    part = {name: value for name, value in part.items() if name not in described and name not in form.described_by}
    ref = _media(part, kind, where, media, limits)
    media.append(ref if place is None else replace(ref, place=place))
    return ItemPart(ref.modality, sum(other.modality == ref.modality for other in media), described)


def _described(part: Mapping[str, Any], where: _Spot, form: ChatForm) -> dict[str, Any]:
    """Return what a part says for the template besides what it holds.

    Raises:
        PromptError: a value is of another kind or too long, or there is one and the template takes content as a string.
    """
    found = {}
    for name, value in part.items():
        if value is None or not isinstance(name, str):
            continue
        if name in form.described_by:
            kinds: tuple[type, ...] = (str,)
        elif form.fields.reads(name):
            kinds = (str, bool, int, float)
        else:
            continue
        param = f"{where.path}.{name}"
        if not isinstance(value, kinds):
            raise PromptError(f"{name!r} of {where} is not text.", f'Write "{name}": "...".', param=param)
        if len(kinds) > 1 and isinstance(value, str) and len(value) > _MAX_DESCRIBED:
            raise PromptError(
                f"{name!r} of {where} has more than {_MAX_DESCRIBED} characters.", "Send it as a text.", param=param
            )
        if value != "" and not form.as_list:
            raise PromptError(
                f"{where} has {name!r}, which this chat template does not read: it takes content as a string.",
                "Leave it out, or write it in the text.",
                param=param,
            )
        found[name] = value
    return found


def _kind(part: Mapping[str, Any], where: _Spot) -> str:
    known = {**_TEXT_TYPES, **_MEDIA_TYPES, embedded_prompt.KEY: ""}
    kind = part.get("type")
    if kind is None:
        kind = next((name for name in known if name in part), None)
    if not isinstance(kind, str) or kind not in known:
        remedy = nearest(str(kind), known) or f"Known: {', '.join(known)}."
        raise PromptError(f"{where} has the unknown type {kind!r}.", remedy, param=f"{where.path}.type")
    return kind


def _media(
    part: Mapping[str, Any], kind: str, where: _Spot, before: Sequence[MediaRef], limits: MediaLimits
) -> MediaRef:
    """Return a part's item, which follows the items `before`; the part's other keys are processing options."""
    modality = _MEDIA_TYPES[kind]
    uuid = part.get("uuid")
    # Parts of these types hold the item's URL under the name that other parts have for it.
    written = f"{modality}_url" if kind in ("input_image", "input_video") else kind
    used = [written]
    source = part.get(written)
    if kind == modality:
        _check_one_source(part, kind, where)
    if source is None and kind == modality:
        used = [name for name in _SOURCES if part.get(name) is not None]
        source = _wrapped(used[0], part[used[0]], modality) if used else None
    place = f"{where.path}.{used[0] if used else written}"
    if kind.endswith("_embeds"):
        source = _embeddings(source, modality, place, before, limits) if source is not None else None
    elif kind == "input_audio" and isinstance(source, Mapping):
        source = _wrapped("base64", source.get("data"), modality)
    elif isinstance(source, Mapping) and "url" in source:
        uuid = source.get("uuid", uuid)
        source = source.get("url")
    elif isinstance(source, Mapping) and (written.endswith("_url") or "uuid" in source):
        uuid = source.get("uuid", uuid)
        source = None
    # The item may be known by its name.
    if source is None and (uuid is None or kind.endswith("_embeds") or kind == "input_audio"):
        raise PromptError(
            f"{where} holds no {modality}.",
            f'Write it under {written!r}, for example {{"type": {kind!r}, {written!r}: ...}}.',
            param=place,
        )
    options = {k: v for k, v in part.items() if k not in used and k not in _NOT_OPTIONS and v is not None}
    of_video = _video_of(options, where, before) if modality == "audio" else None
    return MediaRef(modality, source, options, None if uuid is None else str(uuid), place, of_video)


def _video_of(options: dict[str, Any], where: _Spot, before: Sequence[MediaRef]) -> int | None:
    """Return the number of the video that an audio part belongs to; None if to none. Its mark leaves the options.

    Raises:
        PromptError: there is no such video.
    """
    found = {name: options.pop(name) for name in AUDIO_IN_VIDEO if name in options}
    for name, value in found.items():
        if not isinstance(value, bool):
            raise PromptError(f"{name!r} of {where} must be true or false.", param=f"{where.path}.{name}")
    if not any(found.values()):
        return None
    videos = sum(ref.modality == "video" for ref in before)
    if not videos:
        raise PromptError(
            f"{where} is the audio of a video, but no video precedes it.",
            "Send it directly after its video.",
            param=f"{where.path}.{next(iter(found))}",
        )
    return videos - 1


def _check_one_source(part: Mapping[str, Any], kind: str, where: _Spot) -> None:
    """Refuse a part that says twice where its item is: one of the two would be dropped.

    Raises:
        PromptError: it does.
    """
    given = [name for name in (kind, *_SOURCES) if part.get(name) is not None]
    if len(given) > 1:
        raise PromptError(
            f"{where} holds its {kind} twice, under {given[0]!r} and {given[1]!r}.",
            "Leave one of them out.",
            param=f"{where.path}.{given[1]}",
        )


def _embeddings(source: Any, modality: str, place: str, before: Sequence[MediaRef], limits: MediaLimits) -> Any:
    """Decode base64 in `source`; errors name the item and its place."""
    try:
        return embeds.from_base64(source, limits)
    except MediaError as error:
        number = 1 + sum(ref.modality == modality for ref in before)
        raise error.for_item(item_name(modality, number), place) from error


def _wrapped(name: str, value: Any, modality: str) -> Any:
    """Return bare base64 as a data URL, so that the same checks apply."""
    if name in ("base64", "data") and isinstance(value, str):
        return value if is_data_url(value) else f"data:{modality}/unknown;base64,{value}"
    return value


def _replace_across(parts: Sequence[Part], control: ControlTokens, stand_ins: StandIns) -> list[Part]:
    """Replace spellings, including those that arise only where two texts join.

    A spelling across the boundary of two texts loses its first letter to a stand-in, so that joining the texts does not
    produce it.
    """
    texts = [_text_of(part) for part in parts if not isinstance(part, ItemPart)]
    broken = _crossings(texts, control)
    out: list[Part] = []
    number = 0
    for part in parts:
        if not isinstance(part, ItemPart):
            text, stretches, last = _text_of(part), [], 0
            for place in sorted(broken.get(number, ())):
                stretches += [text[last:place], stand_ins.of(text[place])]
                last = place + 1
            text = stand_ins.replace("".join([*stretches, text[last:]]) if stretches else text, control)
            part = text if isinstance(part, str) else replace(part, text=text)
            number += 1
        if not isinstance(part, str):
            part = replace(part, described=sanitized(part.described, control, stand_ins))
        out.append(part)
    return out


def _text_of(part: str | DescribedText) -> str:
    return part if isinstance(part, str) else part.text


def _crossings(texts: Sequence[str], control: ControlTokens) -> dict[int, set[int]]:
    """Return where spellings across boundaries begin: text number -> offsets in that text.

    Every position near a boundary is checked once, whatever the number of spellings.
    """
    if len(texts) < 2 or control.pattern is None:
        return {}
    reach = max(map(len, control.ids)) - 1
    joined = "".join(texts)
    starts = [0]
    for text in texts:
        starts.append(starts[-1] + len(text))
    broken: dict[int, set[int]] = {}
    seen = 0
    for border in starts[1:-1]:
        for begin in range(max(seen, border - reach), border):
            # Spellings that begin before this boundary and after the previous one; longer ones extend over later ones.
            if joined[begin] in control.beginnings and control.longest_at(joined, begin) > border - begin:
                owner = bisect_right(starts, begin) - 1
                broken.setdefault(owner, set()).add(begin - starts[owner])
        seen = max(seen, border)
    return broken


def _broken_across(
    messages: Sequence[Mapping[str, Any]], control: ControlTokens, stand_ins: StandIns
) -> Sequence[Mapping[str, Any]]:
    """Messages of which none begins a spelling that another one could end, whichever a template puts after it.

    Templates may write nothing between two messages, may leave some out and may strip blanks. A text that ends with the
    beginning of such a spelling loses the first letter of it to a stand-in.
    """
    texts = [text for message in messages for text in _content_texts(message)]
    if len(texts) < 2 or control.pattern is None:
        return messages
    reach = max(map(len, control.ids)) - 1
    heads = {text.lstrip()[:reach] for text in texts}
    begun = {head[:length] for head in heads for length in range(1, len(head) + 1)}
    short = {head for head in heads if 0 < len(head) < reach}

    @cache
    def may_go_on(beginning: str) -> bool:
        """Whether other texts may make it a whole spelling: one goes on to the end, or is used up on the way there."""
        rests = [spelling[len(beginning) :] for spelling in control.ids if spelling.startswith(beginning)]
        return any(
            rest and (rest in begun or any(rest[:length] in short for length in range(1, len(rest)))) for rest in rests
        )

    def broken(text: str) -> str:
        end = len(text.rstrip())
        for begin in range(max(0, end - reach), end):
            if text[begin] in control.beginnings and control.begins(text[begin:end]) and may_go_on(text[begin:end]):
                text = text[:begin] + stand_ins.of(text[begin]) + text[begin + 1 :]
        return text

    return [_with_texts(message, broken) for message in messages]


def _content_texts(message: Mapping[str, Any]) -> list[str]:
    content = message["content"]
    if isinstance(content, str):
        return [content]
    return [value for part in content or () for name, value in part.items() if _is_written(name, value)]


def _is_written(name: str, value: Any) -> bool:
    """Whether a template may write an entry of a part."""
    return isinstance(value, str) and value != "" and name != "type"


def _with_texts(message: Mapping[str, Any], changed: Callable[[str], str]) -> Mapping[str, Any]:
    """The message with each text of its content changed."""
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": changed(content)}
    if content is None:
        return message
    return {
        **message,
        "content": [
            {name: changed(value) if _is_written(name, value) else value for name, value in part.items()}
            for part in content
        ],
    }


def _as_list(parts: Sequence[Part]) -> list[dict[str, Any]]:
    return [_entry(part) for part in parts]


def _entry(part: Part) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if isinstance(part, DescribedText):
        return {"type": "text", "text": part.text, **part.described}
    # Some templates read a part's type, others a key of that name.
    return {"type": part.modality, part.modality: "", **part.described}


def _as_string(parts: Sequence[Part], form: ChatForm) -> str:
    return "\n".join(
        form.placeholder(part.modality, part.number) if isinstance(part, ItemPart) else _text_of(part) for part in parts
    )
