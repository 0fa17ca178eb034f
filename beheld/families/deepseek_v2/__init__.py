"""DeepSeek-V2: text only; latent attention and experts."""

from __future__ import annotations

from beheld.families.family import Family, KnownCheckpoint

FAMILY = Family(
    model_types=("deepseek_v2",),
    tested=(
        KnownCheckpoint(
            "deepseek_v2",
            "DeepseekV2ForCausalLM",
            "deepseek-ai/DeepSeek-V2-Lite-Chat",
            note="latent attention (MLA); experts",
            on_gpu=True,
        ),
    ),
)
