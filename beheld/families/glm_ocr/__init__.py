"""GLM-OCR: GLM-4V's text model after a tower with normalized attention and no learned positions."""

from __future__ import annotations

from beheld.families.family import IMAGE_AND_VIDEO, Family, KnownCheckpoint, ReferenceOptions, ShortName

FAMILY = Family(
    model_types=("glm_ocr",),
    short_names=(
        ShortName("glm-ocr", "zai-org/GLM-OCR", "glm_ocr", "MIT", 1.1, "reads pages: text, tables, formulas"),
    ),
    tested=(
        KnownCheckpoint(
            "glm_ocr",
            "GlmOcrForConditionalGeneration",
            "zai-org/GLM-OCR",
            IMAGE_AND_VIDEO,
            "three-axis positions; the layer that guesses a further token is left out",
            joined=True,
        ),
    ),
    reference=ReferenceOptions(joins_media=True),
)
