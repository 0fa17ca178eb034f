"""GIT, which cannot be run yet."""

from __future__ import annotations

from beheld.families.family import Family

FAMILY = Family(
    model_types=("git",),
    refused="its attention calls no AttentionInterface, and its images stand before the prompt's first position",
)
