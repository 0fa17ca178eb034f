"""MiniMax-M3: images and videos before experts; without its sparse layers."""

from __future__ import annotations

from beheld.families.family import IMAGE_AND_VIDEO, Family, KnownCheckpoint

FAMILY = Family(
    model_types=("minimax_m3_vl",),
    tested=(
        KnownCheckpoint(
            "minimax_m3_vl",
            "MiniMaxM3SparseForConditionalGeneration",
            "MiniMaxAI/MiniMax-M3",
            IMAGE_AND_VIDEO,
            "experts; full layers only: a checkpoint with sparse layers is refused",
            by_census=True,
        ),
    ),
)
