"""ViP-LLaVA: LLaVA whose features come from several layers of the tower."""

from __future__ import annotations

from beheld.families.family import IMAGE, Family, KnownCheckpoint

FAMILY = Family(
    model_types=("vipllava",),
    tested=(
        KnownCheckpoint(
            "vipllava",
            "VipLlavaForConditionalGeneration",
            "llava-hf/vip-llava-7b-hf",
            IMAGE,
            "features of several layers of the tower",
            by_census=True,
        ),
    ),
)
