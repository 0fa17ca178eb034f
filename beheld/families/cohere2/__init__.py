"""Command R and Command A: text only."""

from __future__ import annotations

from beheld.families.family import Family

FAMILY = Family(
    model_types=("cohere", "cohere2", "cohere2_moe"),
    calls=("cohere",),
    reasoning=("cohere",),
)
