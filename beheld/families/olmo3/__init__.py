"""OLMo 3: text only."""

from __future__ import annotations

from beheld.families.family import Family

FAMILY = Family(
    model_types=("olmo3",),
    calls=("olmo3",),
    reasoning=("think",),
)
