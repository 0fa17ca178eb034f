"""Molmo 2: `<|image|>` and `<|video|>` become patches with marks, whose embeddings take another token's places."""

from __future__ import annotations

from beheld.inputs.families import LAID_OUT, Family

FAMILY = Family(
    places={"image": "<|image|>", "video": "<|video|>"},
    begins="with bos or eos",
    host_only=frozenset(("video_metadata", "image_num_crops")),
    most={"video": 1},
    embedded={"image": LAID_OUT, "video": LAID_OUT},
)
