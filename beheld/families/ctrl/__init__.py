"""CTRL: text only, positions of sines."""

from __future__ import annotations

from beheld.families.family import Family

FAMILY = Family(model_types=("ctrl",))
