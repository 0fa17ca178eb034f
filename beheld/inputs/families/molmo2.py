"""Molmo 2: `<|image|>` and `<|video|>` become patches with marks, whose embeddings take another token's places."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from beheld.inputs.families import LAID_OUT, Family
from beheld.inputs.media.effective_size import Seen, Sight, in_pools, numbers


def call(
    processor: Any, modality: str, item: Any, options: Mapping[str, Any], setting: str
) -> tuple[Mapping[str, Any], str]:
    """Run the processor on one picture or video; see families.Call."""
    if modality == "image":
        outputs, texts = processor._process_images([item], **options)
        return outputs, texts[0]
    for known in options["video_metadata"]:
        # What the processor takes for granted anyway, but does not write down.
        known.fps = known.fps or float(processor.video_processor.max_fps)
    outputs, texts = processor._process_videos([item], **options)
    return outputs, texts[0]


def look(sight: Sight) -> Seen | None:
    """How large the picture stands before the tower, behind the windows of its overview; see Family.looks."""
    rows, columns, fine_rows, fine_columns = numbers(sight.outputs["image_grids"])
    patch, pool = sight.edge("patch_size"), sight.setting("pooling_size")
    if patch is None or pool is None:
        return None
    pools = sight.outputs["image_token_pooling"][rows * columns :]
    tiles = numbers(sight.outputs["image_num_crops"])[0]
    seen = in_pools(pools, (fine_rows, fine_columns), (pool[0], pool[1]), patch)
    return Seen(*seen, tiles, step=sight.edge("size") or 0)


def look_at_frames(sight: Sight) -> Seen | None:
    """How large the frames of a video stand before the tower; see Family.looks."""
    frames, rows, columns = numbers(sight.outputs["video_grids"])
    patch, pool = sight.edge("patch_size"), sight.setting("pooling_size")
    if patch is None or pool is None:
        return None
    first = sight.outputs["video_token_pooling"][: rows * columns]
    return Seen(*in_pools(first, (rows, columns), (pool[0], pool[1]), patch), frames=frames)


FAMILY = Family(
    places={"image": "<|image|>", "video": "<|video|>"},
    begins="with bos or eos",
    call=call,
    host_only=frozenset(("video_metadata", "image_num_crops")),
    most={"video": 1},
    embedded={"image": LAID_OUT, "video": LAID_OUT},
    looks={"image": look, "video": look_at_frames},
)
