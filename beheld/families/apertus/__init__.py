"""Apertus: text only."""

from __future__ import annotations

from beheld.families.family import Family

FAMILY = Family(
    model_types=("apertus",),
    calls=("apertus",),
    reasoning=("apertus",),
)
