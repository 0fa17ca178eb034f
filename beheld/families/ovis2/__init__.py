"""Ovis 2: a tower whose outputs are mixtures of a table of visual words."""

from __future__ import annotations

from beheld.families.family import IMAGE, Family, KnownCheckpoint

FAMILY = Family(
    model_types=("ovis2",),
    tested=(
        KnownCheckpoint(
            "ovis2",
            "Ovis2ForConditionalGeneration",
            "thisisiron/Ovis2-1B-hf",
            IMAGE,
            "tiles; visual words",
            by_census=True,
        ),
    ),
    calls=("hermes",),
)
