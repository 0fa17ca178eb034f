"""Seed-OSS: text only."""

from __future__ import annotations

from beheld.families.family import Family

FAMILY = Family(
    model_types=("seed_oss",),
    calls=("seed_oss",),
    reasoning=("seed_oss",),
)
