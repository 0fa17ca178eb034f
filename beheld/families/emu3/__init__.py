"""Emu3: an image becomes tokens of a vocabulary; it reads images here and makes none."""

from __future__ import annotations

from beheld.families.family import IMAGE, Family, KnownCheckpoint

FAMILY = Family(
    model_types=("emu3",),
    tested=(
        KnownCheckpoint(
            "emu3",
            "Emu3ForConditionalGeneration",
            "BAAI/Emu3-Chat-hf",
            IMAGE,
            "an image becomes tokens of a vocabulary; makes no images",
            by_census=True,
        ),
    ),
)
