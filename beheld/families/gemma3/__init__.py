"""Gemma 3: attention within an image runs both ways."""

from __future__ import annotations

from beheld.families.family import IMAGE, Family, KnownCheckpoint

FAMILY = Family(
    model_types=("gemma3",),
    tested=(
        KnownCheckpoint(
            "gemma3",
            "Gemma3ForConditionalGeneration",
            "google/gemma-3-4b-it",
            IMAGE,
            "each image is read both ways, in one step",
            on_gpu=True,
        ),
    ),
    both_ways="media",
)
