"""LFM2-VL: LFM2 with an image tower."""

from __future__ import annotations

from beheld.families.family import IMAGE, Family, KnownCheckpoint

FAMILY = Family(
    model_types=("lfm2_vl",),
    tested=(
        KnownCheckpoint(
            "lfm2_vl",
            "Lfm2VlForConditionalGeneration",
            "LiquidAI/LFM2-VL-450M",
            IMAGE,
            "most layers are short convolutions; images at their native size, large ones in tiles",
            on_gpu=True,
        ),
    ),
    calls=("lfm2",),
    reasoning=("think",),
)
