"""LightOnOCR: Pixtral's tower with merged patches before Qwen3."""

from __future__ import annotations

from beheld.families.family import IMAGE, Family, KnownCheckpoint

FAMILY = Family(
    model_types=("lighton_ocr",),
    tested=(
        KnownCheckpoint(
            "lighton_ocr",
            "LightOnOcrForConditionalGeneration",
            "lightonai/LightOnOCR-1B-1025",
            IMAGE,
            "images at their native size",
        ),
    ),
)
