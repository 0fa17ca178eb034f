"""DeepSeek-V3 and R1: text only; latent attention, experts chosen by groups."""

from __future__ import annotations

from beheld.families.family import Family, KnownCheckpoint

FAMILY = Family(
    model_types=("deepseek_v3",),
    tested=(
        KnownCheckpoint(
            "deepseek_v3",
            "DeepseekV3ForCausalLM",
            "deepseek-ai/DeepSeek-V3",
            note="latent attention (MLA); experts; with BF16 weights: DeepSeek's own FP8 ones are refused",
        ),
    ),
)
