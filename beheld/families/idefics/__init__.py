"""IDEFICS, which cannot be run yet."""

from __future__ import annotations

from beheld.families.family import Family

FAMILY = Family(
    model_types=("idefics",),
    refused="its gated layers attend to images, whose states no group of the cache keeps for it yet",
)
