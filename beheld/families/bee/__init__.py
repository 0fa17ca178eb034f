"""Bee."""

from __future__ import annotations

from beheld.families.family import Family, Undefined

FAMILY = Family(
    model_types=("bee",),
    architectures=("BeeForConditionalGeneration",),
    undefined=Undefined("BeeForConditionalGeneration", "Open-Bee/Bee-8B-RL", "a projector between SigLIP and Qwen3"),
)
