"""Recognizes and checks the forms of a prompt: text, token ids, or a mapping with media."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any

from beheld.core.config import MediaLimits, ModelInfo
from beheld.core.errors import DecodeError, MediaError, PromptError
from beheld.core.media import MODALITIES, MediaRef
from beheld.core.value_checks import nearest
from beheld.inputs.media import embeds
from beheld.inputs.media.decode import is_array, is_image, is_tensor
from beheld.inputs.prompt import embedded_prompt, explicit_prompt, vision_chunks

_RATE = re.compile(r"[\d.,]+ ?(k|khz|hz)?", re.ASCII | re.IGNORECASE)
_LIMITS = MediaLimits()
PromptType = str | Sequence[int] | Mapping[str, Any]

_KEYS = (
    "prompt",
    "prompt_token_ids",
    "multi_modal_data",
    "mm_processor_kwargs",
    "multi_modal_uuids",
    "cache_salt",
    embedded_prompt.KEY,
    "add_special_tokens",
)


@dataclass(frozen=True)
class ParsedPrompt:
    """A parsed prompt.

    Attributes:
        text: the text of a text prompt.
        token_ids: the ids of an id prompt.
        media: its items, in the given order within each modality.
        options: processor options of this request.
        salt: separates prefix caches.
        embeds: the embeddings that take the place of ids.
        ends: whether the text gets the tokenizer's special tokens.
    """

    text: str | None
    token_ids: tuple[int, ...] | None
    media: tuple[MediaRef, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    salt: bytes = b""
    embeds: tuple[embedded_prompt.EmbeddedRange, ...] = ()
    ends: bool = True


def parse(prompt: PromptType, info: ModelInfo, merge_size: int, limits: MediaLimits = _LIMITS) -> ParsedPrompt:
    """Recognize a prompt's form and check it.

    Args:
        prompt: see PromptType.
        info: the model.
        merge_size: patches per embedding along each side, for embeddings with a grid.
        limits: bound embeddings that are given as base64.

    Raises:
        PromptError: an unknown key, or a missing or malformed value.
        MediaError: a malformed item.
    """
    if isinstance(prompt, str):
        return ParsedPrompt(prompt, None)
    if isinstance(prompt, Mapping):
        if explicit_prompt.given(prompt):
            prompt = explicit_prompt.joined(prompt, info)
        return _parse_mapping(prompt, info, merge_size, limits)
    if isinstance(prompt, Sequence) or is_array(prompt) or is_tensor(prompt):
        return ParsedPrompt(None, _token_ids(prompt, info))
    raise PromptError(
        f"A prompt cannot be a {type(prompt).__name__}.",
        'Send text, token ids, or {"prompt": ..., "multi_modal_data": ...}.',
    )


def processor_options(given: Any) -> dict[str, Any]:
    """Return the mm_processor_kwargs of one request; empty if none were given.

    Raises:
        PromptError: they are not a mapping.
    """
    if given is not None and not isinstance(given, Mapping):
        raise PromptError(
            f'"mm_processor_kwargs" must be a mapping, got {type(given).__name__}.',
            'Write names and values, for example {"max_pixels": 200704}.',
            param="mm_processor_kwargs",
        )
    return dict(given or {})


def _parse_mapping(prompt: Mapping[str, Any], info: ModelInfo, merge_size: int, limits: MediaLimits) -> ParsedPrompt:
    for key in prompt:
        if key not in _KEYS:
            remedy = nearest(str(key), _KEYS) or f"Known: {', '.join(_KEYS)}."
            raise PromptError(f"Unknown prompt key {key!r}.", remedy, param=str(key))
    text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    salt = prompt.get("cache_salt")
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise PromptError('"cache_salt" must be a non-empty string.', param="cache_salt")
    salted = b"" if salt is None else salt.encode()
    if prompt.get(embedded_prompt.KEY) is not None:
        tensor = embedded_prompt.tensor_of(prompt, info, limits)
        whole = (embedded_prompt.EmbeddedRange(0, tensor),)
        return ParsedPrompt(None, embedded_prompt.fill(info, len(tensor)), salt=salted, embeds=whole)
    if (text is None) == (ids is None):
        raise PromptError('A prompt needs either "prompt" or "prompt_token_ids".', "Set exactly one of the two.")
    if text is not None and not isinstance(text, str):
        raise PromptError(f'"prompt" must be text, got {type(text).__name__}.', "Send one string.", param="prompt")
    options = processor_options(prompt.get("mm_processor_kwargs"))
    ends = prompt.get("add_special_tokens", True)
    if not isinstance(ends, bool):
        raise PromptError('"add_special_tokens" must be true or false.', param="add_special_tokens")
    media = _media(prompt.get("multi_modal_data"), prompt.get("multi_modal_uuids"), info, merge_size)
    return ParsedPrompt(
        text,
        None if ids is None else _token_ids(ids, info),
        media,
        options,
        salted,
        ends=ends,
    )


def _token_ids(value: Any, info: ModelInfo) -> tuple[int, ...]:
    ids = value.tolist() if hasattr(value, "tolist") else list(value)
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < info.num_ids:
        # Nearly all prompts pass this check, which takes a quarter of the time.
        return tuple(ids)
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int):
            raise PromptError(f"Token ids must be whole numbers, got {token!r}.", param="prompt_token_ids")
        # In some families the placeholders' ids exceed the head's vocabulary.
        if not 0 <= token < info.num_ids and token not in info.placeholder_ids.values():
            raise PromptError(
                f"The token id {token} is out of vocabulary, which has {info.num_ids} ids.", param="prompt_token_ids"
            )
    return tuple(ids)


def _media(data: Any, uuids: Any, info: ModelInfo, merge_size: int) -> tuple[MediaRef, ...]:
    if data is None:
        data = {}
    if not isinstance(data, Mapping) or not isinstance(uuids or {}, Mapping):
        raise PromptError(
            '"multi_modal_data" must be a mapping.', 'Write for example {"image": ...}.', param="multi_modal_data"
        )
    data, uuids = vision_chunks.as_images(data, uuids or {})
    refs: list[MediaRef] = []
    for modality, value in data.items():
        if modality not in MODALITIES:
            remedy = nearest(str(modality), MODALITIES) or f"Known: {', '.join(MODALITIES)}."
            raise PromptError(f"Unknown modality {modality!r}.", remedy, param="multi_modal_data")
        names = uuids.get(modality)
        if value is None and names is None:
            continue
        if modality not in info.modalities:
            refs.append(MediaRef(modality, value))
            continue
        refs += _named(modality, value, names, info, merge_size)
    for modality in uuids:
        if modality not in data:
            raise PromptError(
                f"multi_modal_uuids has {modality!r}, but multi_modal_data does not.", param="multi_modal_uuids"
            )
    return tuple(refs)


def _named(modality: str, value: Any, names: Any, info: ModelInfo, merge_size: int) -> list[MediaRef]:
    """Return the items of a modality; one without content is known by its name."""
    listed = [names] if isinstance(names, str) else None if names is None else list(names)
    if value is None:
        sources: list[Any] = [None] * len(listed or ())
    elif (
        listed is not None
        and isinstance(value, list)
        and any(entry is None for entry in value)
        and len(value) == len(listed)
    ):
        given = [entry for entry in value if entry is not None]
        known = iter(_sources(modality, given, info, merge_size) if given else ())
        sources = [None if entry is None else next(known) for entry in value]
    else:
        sources = _sources(modality, value, info, merge_size)
    listed = [None] * len(sources) if listed is None else listed
    if len(listed) != len(sources):
        raise PromptError(
            f"multi_modal_uuids holds {len(listed)} names for {len(sources)} {modality} items.",
            param="multi_modal_uuids",
        )
    for number, (source, name) in enumerate(zip(sources, listed, strict=True), 1):
        if source is None and name is None:
            raise DecodeError(
                "The item is None, and has no name in multi_modal_uuids.",
                "Leave it out if there is none.",
                item=f"{modality} {number}",
            )
    return [MediaRef(modality, source, uuid=name) for source, name in zip(sources, listed, strict=True)]


def _sources(modality: str, value: Any, info: ModelInfo, merge_size: int) -> list[Any]:
    """Return one source per item."""
    if embeds.given(value):
        return _located(modality, lambda: list(embeds.split(value, modality, info, merge_size)))
    if isinstance(value, list | tuple) and len(value) and all(embeds.given(entry) for entry in value):
        entries: list[Any] = []
        for number, entry in enumerate(value, 1):
            entries += _located(f"{modality} {number}", lambda e=entry: embeds.split(e, modality, info, merge_size))
        return entries
    return {"image": _images, "video": _videos, "audio": _audio_items}[modality](value)


def _located(item: str, make: Any) -> list[Any]:
    try:
        found: list[Any] = make()
    except MediaError as error:
        raise error.for_item(item) from error
    return found


def _single(value: Any) -> bool:
    return isinstance(value, str | bytes | bytearray | Path) or is_image(value)


def _images(value: Any) -> list[Any]:
    if _single(value) or (is_array(value) and value.ndim < 4):
        return [value]
    return _entries("image", value)


def _videos(value: Any) -> list[Any]:
    if _single(value) or ((is_array(value) or is_tensor(value)) and value.ndim < 5):
        return [value]
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping | None):
        return [value]
    if isinstance(value, list | tuple) and value and all(is_image(v) or (is_array(v) and v.ndim < 4) for v in value):
        return [list(value)]
    if isinstance(value, list | tuple) and not value:
        # An empty list is a video without frames, not a missing video; counting its frames reports it.
        return [[]]
    return _entries("video", value)


def _audio_items(value: Any) -> list[Any]:
    if _single(value) or is_array(value) or is_tensor(value):
        return [value]
    if isinstance(value, tuple) and len(value) == 2 and (isinstance(value[1], Real) or _rate_as_text(value[1])):
        return [value]
    return _entries("audio", value)


def _rate_as_text(value: Any) -> bool:
    """Return whether a value looks like a number: a wrong sampling rate rather than a second item."""
    return isinstance(value, str) and _RATE.fullmatch(value) is not None


def _entries(modality: str, value: Any) -> list[Any]:
    if not isinstance(value, list | tuple) and not is_array(value):
        raise DecodeError(
            f"A {type(value).__name__} cannot be read as {modality}.",
            "See the documentation of multi_modal_data.",
            item=modality,
        )
    entries = list(value)
    for number, entry in enumerate(entries, 1):
        if entry is None:
            raise DecodeError(
                "The item is None.", "Leave out the modality if there is no item.", item=f"{modality} {number}"
            )
    return entries
