"""Mistral 3: images at their native size."""

from __future__ import annotations

from beheld.families.family import IMAGE, Family, KnownCheckpoint

FAMILY = Family(
    model_types=("mistral3",),
    tested=(
        KnownCheckpoint(
            "mistral3",
            "Mistral3ForConditionalGeneration",
            "mistralai/Mistral-Small-3.1-24B-Instruct-2503",
            IMAGE,
            "images at their native size",
        ),
    ),
    calls=("mistral",),
    reasoning=("mistral",),
)
