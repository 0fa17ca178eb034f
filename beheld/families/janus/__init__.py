"""Janus: SigLIP before Llama; it reads images here and makes none."""

from __future__ import annotations

from beheld.families.family import IMAGE, Family, KnownCheckpoint

FAMILY = Family(
    model_types=("janus",),
    tested=(
        KnownCheckpoint(
            "janus",
            "JanusForConditionalGeneration",
            "deepseek-community/Janus-Pro-1B",
            IMAGE,
            "reads images, and makes none",
            by_census=True,
        ),
    ),
)
