"""DeepSeek-VL2."""

from __future__ import annotations

from beheld.families.family import Family, Undefined

FAMILY = Family(
    model_types=("deepseek_vl_v2",),
    architectures=("DeepseekVLV2ForCausalLM",),
    undefined=Undefined(
        "DeepseekVLV2ForCausalLM", "deepseek-ai/deepseek-vl2-tiny", "a processor of tiles, a projector, experts"
    ),
)
