"""Describes for receipts what the model sees of an item, in words and numbers.

Every model resizes to its resolution, so resizing is reported as use, not as loss. A loss is detail or shape that a
reader would miss: a side shrunk more than fourfold, an aspect ratio changed by more than a quarter, or a cut edge. An
aspect ratio that changes because sides become multiples of the model's patches or tiles is not a loss, unless it
changes more than twofold: every image is read this way, and few fit exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from beheld.core.media import MediaItem
from beheld.families.inputs import EffectiveSize, ProcessedItem, Size
from beheld.inputs.media.frames import Shown

_MAX_SHRINK = 4.0
_MAX_STRETCH = 1.25
_MAX_ROUNDED = 2.0
_MAX_UNHEARD_S = 0.1
_Described = tuple[Mapping[str, Any], tuple[str, ...]]


def used_image(item: ProcessedItem, seen: EffectiveSize | None) -> _Described:
    """Describe what is seen of an image; empty if unknown."""
    if seen is None:
        return {}, ()
    used: dict[str, Any] = {"width": seen.width, "height": seen.height}
    if seen.tiles > 1:
        used["tiles"] = seen.tiles
    if _is_cropped(item, seen) and (crop := _kept(item.size, (seen.width, seen.height))) is not None:
        used["crop"] = crop
    return used, _lost(item, seen)


def used_video(given: int, shown: Shown, item: ProcessedItem, seen: EffectiveSize | None) -> _Described:
    """Describe what is seen of a clip of `given` frames, and the metadata that the model receives.

    Unknown values have no entry.
    """
    metadata: dict[str, Any] = {}
    clip = shown.timed(item.outputs, item.part)
    if shown.assumed and clip.fps is not None:
        metadata["assumed_fps"] = clip.fps
    if shown.idle:
        metadata["options_without_effect"] = list(shown.idle)
    if seen is None:
        return metadata, ()
    # The last frame may occur twice, where frames are joined in pairs.
    used: dict[str, Any] = {"frames": min(given, seen.frames), "width": seen.width, "height": seen.height}
    lost = _lost(item, seen)
    if used["frames"] < given:
        lost += (f"the processor left out {given - used['frames']} of {given} frames",)
    times = clip.timestamps_s() or ()
    for metadata_times in (times, tuple(dict.fromkeys(times))):
        if len(metadata_times) == used["frames"]:
            used["timestamps_s"] = metadata_times
            break
    return used | metadata, lost


def _lost(item: ProcessedItem, seen: EffectiveSize) -> tuple[str, ...]:
    whole = (seen.width, seen.height)
    if _is_cropped(item, seen):
        return _cropped(item.size, whole)
    return _shrunk(item.size, whole) + _stretched(item.size, whole, seen.step)


def used_audio(wave: Any, item: MediaItem, part: Any) -> _Described:
    """Describe what is heard of an audio item."""
    hop = getattr(part, "hop_length", None)
    mask = item.features.get("feature_attention_mask", item.features.get("input_features_mask"))
    heard = wave.seconds if mask is None or not hop else int(mask.sum()) * hop / wave.rate
    # The last samples may not fill a feature frame; that is not a loss.
    if wave.seconds - heard <= _MAX_UNHEARD_S:
        return {"seconds": round(wave.seconds, 3), "rate": wave.rate}, ()
    lost = (f"only the first {heard:g} of {wave.seconds:g} s are heard",)
    return {"seconds": round(heard, 3), "rate": wave.rate}, lost


def _shrunk(given: Size, seen: Size) -> tuple[str, ...]:
    return _shrunk_by(max(given[0] / seen[0], given[1] / seen[1]))


def _shrunk_by(factor: float) -> tuple[str, ...]:
    return (f"it was shrunk {factor:.1f} times and lost fine detail",) if factor > _MAX_SHRINK else ()


def _stretched(given: Size, seen: Size, step: int) -> tuple[str, ...]:
    ratio = (given[0] / given[1]) / (seen[0] / seen[1])
    factor = max(ratio, 1 / ratio)
    if factor <= (_MAX_ROUNDED if _is_rounded(given, seen, step) else _MAX_STRETCH):
        return ()
    return (f"its aspect ratio was changed by a factor of {factor:.2f}",)


def _is_rounded(given: Size, seen: Size, step: int) -> bool:
    """Return whether the seen size is the given one at some scale, with both sides rounded to steps by one rule.

    Rounding moves a side by less than a step, up or down; with one rule for both sides, the difference is less than a
    step. Hence three ranges of the scale, which must overlap.
    """
    ranges = [((side - step) / own, (side + step) / own) for side, own in zip(seen, given, strict=True)]
    apart, own = seen[0] - seen[1], given[0] - given[1]
    if own == 0:
        return abs(apart) < step
    ends = ((apart - step) / own, (apart + step) / own)
    ranges.append((min(ends), max(ends)))
    return step > 0 and max(start for start, _ in ranges) < min(stop for _, stop in ranges)


def _is_cropped(item: ProcessedItem, seen: EffectiveSize) -> bool:
    return seen.tiles == 1 and bool(item.setting("do_center_crop"))


def _kept(given: Size, seen: Size) -> tuple[int, int, int, int] | None:
    """Return the part of an image that is left, (x1, y1, x2, y2) in its own pixels; None if that is all of it.

    The shorter side is fitted to the model's, and of the longer the middle is kept.
    """
    scale = max(seen[0] / given[0], seen[1] / given[1])
    width, height = (min(own, round(side / scale)) for own, side in zip(given, seen, strict=True))
    left, top = (given[0] - width) // 2, (given[1] - height) // 2
    return None if (width, height) == tuple(given) else (left, top, left + width, top + height)


def _cropped(given: Size, seen: Size) -> tuple[str, ...]:
    """Describe an image whose shorter side is fitted to the model's, with the longer side cropped."""
    scale = max(seen[0] / given[0], seen[1] / given[1])
    kept = (seen[0] / (given[0] * scale)) * (seen[1] / (given[1] * scale))
    lost = (f"{100 * (1 - kept):.0f} % of it was cut off at the edges",) if kept < 0.99 else ()
    return lost + _shrunk_by(1 / scale)
