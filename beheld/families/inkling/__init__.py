"""Inkling, which cannot be run yet."""

from __future__ import annotations

from beheld.families.family import Family

FAMILY = Family(
    model_types=("inkling_mm_model", "inkling2"),
    refused="each query makes a bias of its own for every distance, and a layer convolves keys, values and what its "
    "two halves give with the tokens before; neither is computed here yet",
)
