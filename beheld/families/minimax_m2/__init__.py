"""MiniMax-M2: text only."""

from __future__ import annotations

from beheld.families.family import Family

FAMILY = Family(
    model_types=("minimax_m2",),
    calls=("minimax_m2",),
    reasoning=("think",),
)
