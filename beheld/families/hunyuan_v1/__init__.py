"""Hunyuan A13B and the dense Hunyuan models: text only."""

from __future__ import annotations

from beheld.families.family import Family

FAMILY = Family(
    model_types=("hunyuan_v1_dense", "hunyuan_v1_moe"),
    calls=("hunyuan_a13b",),
    reasoning=("hunyuan_a13b", "think"),
)
