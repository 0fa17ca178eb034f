"""Qwen3.5: layers with linear attention."""

from __future__ import annotations

from beheld.families.family import Family

FAMILY = Family(
    model_types=("qwen3_5", "qwen3_5_moe"),
    refused="some of its layers are linear attention, for which there is no cache",
)
