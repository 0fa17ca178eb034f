"""HunyuanOCR: four-axis positions; a newline ends each row of an image."""

from __future__ import annotations

from beheld.families.family import IMAGE, Family, KnownCheckpoint

FAMILY = Family(
    model_types=("hunyuan_vl",),
    tested=(
        KnownCheckpoint(
            "hunyuan_vl",
            "HunYuanVLForConditionalGeneration",
            "tencent/HunyuanOCR",
            IMAGE,
            "four-axis positions; a newline ends each row of an image; long answers that repeat themselves end",
        ),
    ),
)
