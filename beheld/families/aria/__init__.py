"""Aria: mixture of experts; learned queries read images."""

from __future__ import annotations

from beheld.families.family import IMAGE, Family, KnownCheckpoint

FAMILY = Family(
    model_types=("aria",),
    tested=(
        KnownCheckpoint(
            "aria",
            "AriaForConditionalGeneration",
            "rhymes-ai/Aria",
            IMAGE,
            "experts; images are read by learned queries",
        ),
    ),
)
