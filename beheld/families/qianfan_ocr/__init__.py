"""Qianfan-OCR: InternViT's kind of tower with tiles before Qwen3."""

from __future__ import annotations

from beheld.families.family import IMAGE, Family, KnownCheckpoint

FAMILY = Family(
    model_types=("qianfan_ocr",),
    tested=(
        KnownCheckpoint(
            "qianfan_ocr",
            "QianfanOCRForConditionalGeneration",
            "baidu/Qianfan-OCR",
            IMAGE,
            "tiles",
            by_census=True,
        ),
    ),
)
