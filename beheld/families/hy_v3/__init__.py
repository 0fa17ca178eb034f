"""Hy3: text only."""

from __future__ import annotations

from beheld.families.family import Family

FAMILY = Family(
    model_types=("hy_v3",),
    calls=("hy_v3",),
    reasoning=("think",),
)
