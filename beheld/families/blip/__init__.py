"""BLIP, which cannot be run yet."""

from __future__ import annotations

from beheld.families.family import Family

FAMILY = Family(
    model_types=("blip",),
    refused="its text layers attend to an image by an attention that calls no AttentionInterface",
)
