"""What the model sees of an item, in words and numbers for its receipt.

Resizing to the model's own resolution is what models do, so it is reported as used, not as lost. It counts as a loss
where detail or shape goes that a reader would miss: a side shrunk more than fourfold, an aspect ratio changed by more
than a quarter, or an edge cut off.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from beheld.core.media import MediaItem

_MAX_SHRINK = 4.0
_MAX_STRETCH = 1.25
_MAX_UNHEARD_S = 0.1
_Described = tuple[Mapping[str, Any], tuple[str, ...]]


def used_image(size: tuple[int, int], item: MediaItem, part: Any, options: Mapping[str, Any]) -> _Described:
    """What is seen of a picture of `size` (width, height)."""
    width, height = size
    grid = item.layout.get("image_grid_thw")
    if grid is not None:
        seen = _grid_pixels(grid, part, options)
        return {"width": seen[0], "height": seen[1]}, _shrunk(size, seen) + _stretched(size, seen)
    # Phi-4's processor names them after what they are of.
    pixels = item.features.get("pixel_values", item.features.get("image_pixel_values"))
    if pixels is None:
        return {}, ()
    tile_height, tile_width = int(pixels.shape[-2]), int(pixels.shape[-1])
    if pixels.dim() == 5:
        tiles = int(pixels.shape[1])
        # The first tile is the whole picture; the others together are its detailed view.
        area = max(1, tiles - 1) * tile_height * tile_width
        shrink = math.sqrt(width * height / area)
        return {"width": tile_width, "height": tile_height, "tiles": tiles}, _shrunk_by(shrink)
    if getattr(part, "do_center_crop", False) and options.get("do_center_crop") is not False:
        return {"width": tile_width, "height": tile_height}, _cropped(size, (tile_width, tile_height))
    seen = (tile_width, tile_height)
    return {"width": tile_width, "height": tile_height}, _shrunk(size, seen) + _stretched(size, seen)


def used_video(clip: Any, item: MediaItem, part: Any) -> _Described:
    """What is seen of a clip."""
    frames = len(clip.frames)
    size = (clip.frames.shape[2], clip.frames.shape[1])
    lost: tuple[str, ...] = ()
    used: dict[str, Any] = {"frames": frames}
    grid = item.layout.get("video_grid_thw")
    pixels = item.features.get("pixel_values_videos")
    if grid is not None:
        seen = _grid_pixels(grid, part, {})
        used |= {
            "width": seen[0],
            "height": seen[1],
            "frames": min(frames, grid[0] * _whole(part, "temporal_patch_size", 1)),
        }
        lost += _shrunk(size, seen) + _stretched(size, seen)
    elif pixels is not None and pixels.dim() == 5:
        seen = (int(pixels.shape[-1]), int(pixels.shape[-2]))
        used |= {"width": seen[0], "height": seen[1], "frames": int(pixels.shape[1])}
        lost += _shrunk(size, seen) + _stretched(size, seen)
    if used["frames"] < frames:
        lost += (f"the processor left out {frames - used['frames']} of {frames} frames",)
    times = clip.timestamps_s()
    if times is not None and used["frames"] == frames:
        used["timestamps_s"] = times
    return used, lost


def used_audio(wave: Any, item: MediaItem, part: Any) -> _Described:
    """What is heard of a sound."""
    hop = getattr(part, "hop_length", None)
    mask = item.features.get("feature_attention_mask", item.features.get("input_features_mask"))
    heard = wave.seconds if mask is None or not hop else int(mask.sum()) * hop / wave.rate
    # The last samples may not fill a frame of features; that is not a loss.
    if wave.seconds - heard <= _MAX_UNHEARD_S:
        return {"seconds": round(wave.seconds, 3), "rate": wave.rate}, ()
    lost = (f"only the first {heard:g} of {wave.seconds:g} s are heard",)
    return {"seconds": round(heard, 3), "rate": wave.rate}, lost


def _grid_pixels(grid: tuple[Any, ...], part: Any, options: Mapping[str, Any]) -> tuple[int, int]:
    patch = int(options.get("patch_size") or _whole(part, "patch_size", 14))
    return int(grid[2]) * patch, int(grid[1]) * patch


def _whole(part: Any, name: str, default: int) -> int:
    value = getattr(part, name, None)
    return value if isinstance(value, int) else default


def _shrunk(given: tuple[int, int], seen: tuple[int, int]) -> tuple[str, ...]:
    return _shrunk_by(max(given[0] / seen[0], given[1] / seen[1]))


def _shrunk_by(factor: float) -> tuple[str, ...]:
    return (f"it was shrunk {factor:.1f} times, so that fine detail is gone",) if factor > _MAX_SHRINK else ()


def _stretched(given: tuple[int, int], seen: tuple[int, int]) -> tuple[str, ...]:
    ratio = (given[0] / given[1]) / (seen[0] / seen[1])
    if max(ratio, 1 / ratio) <= _MAX_STRETCH:
        return ()
    return (f"its aspect ratio was changed by a factor of {max(ratio, 1 / ratio):.2f}",)


def _cropped(given: tuple[int, int], seen: tuple[int, int]) -> tuple[str, ...]:
    """The shorter side is fitted to the model's, and what stands over on the longer side is cut off."""
    scale = max(seen[0] / given[0], seen[1] / given[1])
    kept = (seen[0] / (given[0] * scale)) * (seen[1] / (given[1] * scale))
    lost = (f"{100 * (1 - kept):.0f} % of it was cut off at the edges",) if kept < 0.99 else ()
    return lost + _shrunk_by(1 / scale)
