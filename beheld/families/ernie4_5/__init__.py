"""ERNIE 4.5: text only, dense and with experts."""

from __future__ import annotations

from beheld.families.family import Family

FAMILY = Family(
    model_types=("ernie4_5", "ernie4_5_moe"),
    calls=("hermes",),
    reasoning=("ernie45", "think"),
)
