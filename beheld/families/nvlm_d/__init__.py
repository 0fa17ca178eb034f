"""NVLM-D."""

from __future__ import annotations

from beheld.families.family import Family, Undefined

FAMILY = Family(
    model_types=("NVLM_D",),
    architectures=("NVLM_D",),
    undefined=Undefined("NVLM_D", "nvidia/NVLM-D-72B", "InternViT-6B, a custom projector, tagged tiles, Qwen2"),
)
