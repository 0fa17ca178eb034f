"""LFM2-VL: LFM2 with an image tower."""

from __future__ import annotations

from beheld.families.family import IMAGE, Family, KnownCheckpoint, ShortName

FAMILY = Family(
    model_types=("lfm2_vl",),
    short_names=(
        ShortName(
            "lfm2-vl-450m", "LiquidAI/LFM2-VL-450M", "lfm2_vl", "LFM Open License 1.0", 0.45, "fast answers on a laptop"
        ),
    ),
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
