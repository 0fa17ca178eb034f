"""LFM2, dense and with experts: most layers are short convolutions."""

from __future__ import annotations

from beheld.families.family import Family

FAMILY = Family(
    model_types=("lfm2", "lfm2_moe", "lfm3"),
    calls=("lfm2",),
    reasoning=("think",),
)
