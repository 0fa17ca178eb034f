"""Kosmos 2, which cannot be run yet."""

from __future__ import annotations

from beheld.families.family import Family

FAMILY = Family(
    model_types=("kosmos-2",),
    refused="each embedding of an image has a placeholder id of its own, and prompts here know one",
)
