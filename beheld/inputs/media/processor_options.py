"""Processor options: merged from engine, request and item, checked by name, and converted to the processor's terms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from beheld.core.errors import ParamsError, first_line
from beheld.core.value_checks import nearest

GROUPS = {"image": "images_kwargs", "video": "videos_kwargs", "audio": "audio_kwargs"}
# The engine sets these: the form and the device of the tensors.
_RESERVED = frozenset(("return_tensors", "device", "data_format", "input_data_format", "disable_grouping"))
_RESERVED |= frozenset(("sampling_rate", "raw_speech", "return_attention_mask", "load_audio_backend"))
_RESERVED |= frozenset(("padding", "max_length", "pad_to_multiple_of", "video_metadata", "return_metadata"))
# Some processors write a video's times into the prompt, and leave it to the caller that they are returned.
_ALWAYS: dict[str, dict[str, Any]] = {"video": {"return_metadata": True}}
# A local file, which only the checkpoint may name.
_RESERVED |= frozenset(("font",))
# Fixed by the weights: the sizes of a tower's inputs, and of what it joins.
_FIXED = frozenset(("patch_size", "temporal_patch_size", "merge_size", "num_channels"))


def merged(*layers: Mapping[str, Any] | None) -> dict[str, Any]:
    """Merge options of several layers, later over earlier; groups such as "images_kwargs" are merged one level deep."""
    out: dict[str, Any] = {}
    for layer in layers:
        for name, value in (layer or {}).items():
            if name in GROUPS.values() and isinstance(value, Mapping):
                out[name] = {**out.get(name, {}), **value}
            else:
                out[name] = value
    return out


def groups(options: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Yield the options, including those in groups."""
    return [options, *(value for value in options.values() if isinstance(value, Mapping))]


def known_names(processor: Any, modality: str) -> frozenset[str]:
    """Return the option names that the processor accepts for a modality."""
    part = part_of(processor, modality)
    kinds = getattr(part, "valid_kwargs", None)
    if kinds is None and part is not None:
        # Options of audio feature extraction that the extractor does not list.
        kinds = getattr(processor.valid_processor_kwargs, "__annotations__", {}).get(GROUPS[modality])
    return frozenset(getattr(kinds, "__annotations__", {})) - _RESERVED


def part_of(processor: Any, modality: str) -> Any:
    """Return the sub-processor of a modality, or None."""
    if modality == "audio":
        return getattr(processor, "audio_processor", getattr(processor, "feature_extractor", None))
    return getattr(processor, f"{modality}_processor", None)


def of_modality(processor: Any, modality: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options for `modality`, in the terms of its sub-processor.

    Options for other modalities are left out; unknown ones are an error. `min_pixels` and `max_pixels` become the
    sub-processor's `size`, as they do when the processor is loaded with them.

    Raises:
        ParamsError: an option is unknown (the message names the nearest known one), or cannot be set.
    """
    names = {kind: known_names(processor, kind) for kind in GROUPS}
    out: dict[str, Any] = {}
    for name, value in options.items():
        if name in GROUPS.values():
            continue
        if name in names[modality]:
            out[name] = value
        elif not any(name in known for known in names.values()):
            _refuse(name, frozenset().union(*names.values()))
    group = options.get(GROUPS[modality])
    if group is not None:
        if not isinstance(group, Mapping):
            raise ParamsError(f"{GROUPS[modality]} must be a mapping, got {group!r}.", param="mm_processor_kwargs")
        for name, value in group.items():
            if name not in names[modality]:
                _refuse(name, names[modality])
            out[name] = value
    part = part_of(processor, modality)
    _check_fixed(part, out)
    return _pixels_to_size(part, out)


def _check_fixed(part: Any, options: Mapping[str, Any]) -> None:
    """Refuse options that the weights fix: other values would give features that do not fit the towers."""
    for name in _FIXED & set(options):
        own = getattr(part, name, options[name])
        if options[name] != own:
            raise ParamsError(
                f"{name} is {own!r} in this model and fixed by its weights; it cannot be {options[name]!r}.",
                "Leave it out.",
                param="mm_processor_kwargs",
            )


# Options of some processors that are set in another way here -> how.
_ELSEWHERE = {"video_metadata": 'Give it together with the frames, as (frames, {"fps": 2.0}).'}


def _refuse(name: str, known: frozenset[str]) -> None:
    remedy = _ELSEWHERE.get(name) or nearest(name, known) or _all_of(known)
    raise ParamsError(f"The processor of this model has no option {name!r}.", remedy, param="mm_processor_kwargs")


def _all_of(known: frozenset[str]) -> str:
    return f"Known: {', '.join(sorted(known))}." if known else "It has none: leave it out."


def _pixels_to_size(part: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Write min_pixels and max_pixels as the two edges of `size`, each over the loaded value."""
    low, high = options.pop("min_pixels", None), options.pop("max_pixels", None)
    if low is None and high is None:
        return options
    size = dict(options.get("size") or _as_dict(getattr(part, "size", None)))
    for name, value, edge in (("min_pixels", low, "shortest_edge"), ("max_pixels", high, "longest_edge")):
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ParamsError(f"{name} must be a whole number above 0, got {value!r}.", param="mm_processor_kwargs")
        size[edge] = value
    return {**options, "size": size}


def _as_dict(size: Any) -> dict[str, Any]:
    return {name: value for name, value in dict(size or {}).items() if value is not None}


def arguments(processor: Any, modality: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sub-processor's arguments as the processor would pass them: its defaults, then the options.

    Raises:
        ParamsError: an option has a value of a type that the processor does not accept.
    """
    group = GROUPS[modality]

    def merged(own: Mapping[str, Any]) -> dict[str, Any]:
        merge: dict[str, dict[str, Any]] = processor._merge_kwargs(
            processor.valid_processor_kwargs,
            tokenizer_init_kwargs=processor.tokenizer.init_kwargs if hasattr(processor, "tokenizer") else {},
            **{group: {**own, **_ALWAYS.get(modality, {}), "return_tensors": "pt"}},
        )
        return merge[group]

    try:
        return merged(options)
    except Exception as error:
        for name, value in options.items():
            _check_alone(merged, name, value)
        raise ParamsError(
            "The processor of this model does not accept these options.",
            param="mm_processor_kwargs",
            detail=first_line(error),
        ) from error


def _check_alone(merged: Callable[[Mapping[str, Any]], Any], name: str, value: Any) -> None:
    try:
        merged({name: value})
    except Exception as error:
        # Only the first line names the option.
        message = (str(error).strip() or type(error).__name__).splitlines()[:2][-1]
        reason = message.strip().removeprefix("TypeError: ").partition(" Errors:")[0]
        raise ParamsError(
            f"The processor of this model does not accept {value!r} as {name}.",
            "See the processor's settings in preprocessor_config.json for a value of the right type.",
            param="mm_processor_kwargs",
            detail=reason,
        ) from error
