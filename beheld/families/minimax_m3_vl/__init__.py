"""MiniMax-M3: images and videos before experts; without its sparse layers."""

from __future__ import annotations

from beheld.families.family import IMAGE_AND_VIDEO, Family, KnownCheckpoint, OldestTransformers

FAMILY = Family(
    model_types=("minimax_m3_vl",),
    tested=(
        KnownCheckpoint(
            "minimax_m3_vl",
            "MiniMaxM3SparseForConditionalGeneration",
            "MiniMaxAI/MiniMax-M3",
            IMAGE_AND_VIDEO,
            "experts; full layers only: a checkpoint with sparse layers is refused; needs transformers 5.23",
            by_census=True,
        ),
    ),
    # Before 5.18 its tower also rotates by two axes of three.
    oldest=OldestTransformers("5.23", "lets the images of one call of the tower attend to each other"),
    calls=("minimax_m3",),
    reasoning=("minimax_m3",),
)
