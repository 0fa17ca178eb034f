"""DeepSeek-VL: SigLIP before Llama."""

from __future__ import annotations

from beheld.families.family import IMAGE, Family, KnownCheckpoint

FAMILY = Family(
    model_types=("deepseek_vl", ),
    tested=(
        KnownCheckpoint(
            "deepseek_vl",
            "DeepseekVLForConditionalGeneration",
            "deepseek-community/deepseek-vl-1.3b-chat",
            IMAGE,
            "",
            by_census=True,
        ),
    ),
)
