"""Inkling, which cannot be run yet."""

from __future__ import annotations

from beheld.families.family import Family

FAMILY = Family(
    model_types=("inkling_mm_model", "inkling2"),
    refused="its attention adds a learned bias by distance to the scores, and convolves keys and values before it",
)
