"""Granite 3 and 4, dense and with experts: text only."""

from __future__ import annotations

from beheld.families.family import Family

FAMILY = Family(
    model_types=("granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared"),
    calls=("qwen3_coder", "granite", "hermes"),
    reasoning=("granite", "ernie45", "think"),
)
