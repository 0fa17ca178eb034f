"""DeepSeek-VL: SigLIP before Llama; in the hybrid form, SAM, and SAM for large images."""

from __future__ import annotations

from beheld.families.family import IMAGE, Family, KnownCheckpoint

FAMILY = Family(
    model_types=(
        "deepseek_vl",
        "deepseek_vl_hybrid",
    ),
    tested=(
        KnownCheckpoint(
            "deepseek_vl",
            "DeepseekVLForConditionalGeneration",
            "deepseek-community/deepseek-vl-1.3b-chat",
            IMAGE,
            "",
            by_census=True,
        ),
        KnownCheckpoint(
            "deepseek_vl_hybrid",
            "DeepseekVLHybridForConditionalGeneration",
            "deepseek-community/deepseek-vl-7b-chat",
            IMAGE,
            "two towers, of low and of high resolution",
            by_census=True,
        ),
    ),
)
