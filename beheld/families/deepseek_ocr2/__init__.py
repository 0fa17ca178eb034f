"""DeepSeek-OCR 2: SAM's tower, read by learned queries in causal order, before experts."""

from __future__ import annotations

from beheld.families.family import IMAGE, Family, KnownCheckpoint, OldestTransformers

FAMILY = Family(
    model_types=("deepseek_ocr2",),
    tested=(
        KnownCheckpoint(
            "deepseek_ocr2",
            "DeepseekOcr2ForConditionalGeneration",
            "deepseek-community/DeepSeek-OCR-2",
            IMAGE,
            "an overview and two to six tiles; experts; answers do not repeat themselves; needs transformers 5.20",
            by_census=True,
        ),
    ),
    oldest=OldestTransformers("5.20", "has a processor that does not report which tokens stand for an image"),
)
