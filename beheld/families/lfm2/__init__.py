"""LFM2: most layers are short convolutions."""

from __future__ import annotations

from beheld.families.family import Family

FAMILY = Family(
    model_types=("lfm2",),
)
