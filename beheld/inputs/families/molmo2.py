"""Molmo 2: `<|image|>` and `<|video|>` become patches with marks, whose embeddings take another token's places."""

from __future__ import annotations

from beheld.inputs.families import LAID_OUT, Family
from beheld.inputs.sight import Seen, Sight, in_pools, numbers


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
    host_only=frozenset(("video_metadata", "image_num_crops")),
    most={"video": 1},
    embedded={"image": LAID_OUT, "video": LAID_OUT},
    looks={"image": look, "video": look_at_frames},
)
