"""EXAONE 4: text only, dense and with experts."""

from __future__ import annotations

from beheld.families.family import Family

FAMILY = Family(
    model_types=("exaone4", "exaone_moe"),
    calls=("hermes",),
    reasoning=("think",),
)
