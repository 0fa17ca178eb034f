"""Molmo 2: `<|image|>` and `<|video|>` become patches with delimiters, whose embeddings replace another token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from beheld.families.inputs import LAID_OUT, EffectiveSize, FamilyInputs, ProcessedItem
from beheld.inputs.media.effective_size import in_pools, numbers


def call(
    processor: Any, modality: str, item: Any, options: Mapping[str, Any], setting: str
) -> tuple[Mapping[str, Any], str]:
    """Run the processor on one image or video; see families.inputs.Call."""
    if modality == "image":
        outputs, texts = processor._process_images([item], **options)
        return outputs, texts[0]
    for known in options["video_metadata"]:
        # A default of the processor that it does not store.
        known.fps = known.fps or float(processor.video_processor.max_fps)
    outputs, texts = processor._process_videos([item], **options)
    return outputs, texts[0]


def look(item: ProcessedItem) -> EffectiveSize | None:
    """Return the image's effective size, from its crops after the overview; see FamilyInputs.looks."""
    rows, columns, fine_rows, fine_columns = numbers(item.outputs["image_grids"])
    patch, pool = item.edge("patch_size"), item.setting("pooling_size")
    if patch is None or pool is None:
        return None
    pools = item.outputs["image_token_pooling"][rows * columns :]
    tiles = numbers(item.outputs["image_num_crops"])[0]
    seen = in_pools(pools, (fine_rows, fine_columns), (pool[0], pool[1]), patch)
    return EffectiveSize(*seen, tiles, step=item.edge("size") or 0)


def look_at_frames(item: ProcessedItem) -> EffectiveSize | None:
    """Return the effective size of a video's frames; see FamilyInputs.looks."""
    frames, rows, columns = numbers(item.outputs["video_grids"])
    patch, pool = item.edge("patch_size"), item.setting("pooling_size")
    if patch is None or pool is None:
        return None
    first = item.outputs["video_token_pooling"][: rows * columns]
    return EffectiveSize(*in_pools(first, (rows, columns), (pool[0], pool[1]), patch), frames=frames)


INPUTS = FamilyInputs(
    places={"image": "<|image|>", "video": "<|video|>"},
    begins="with bos or eos",
    call=call,
    host_only=frozenset(("video_metadata", "image_num_crops")),
    most={"video": 1},
    embedded={"image": LAID_OUT, "video": LAID_OUT},
    looks={"image": look, "video": look_at_frames},
)
