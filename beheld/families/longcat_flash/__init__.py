"""LongCat-Flash: text only."""

from __future__ import annotations

from beheld.families.family import Family

FAMILY = Family(
    model_types=("longcat_flash",),
    calls=("longcat",),
    reasoning=("longcat",),
)
