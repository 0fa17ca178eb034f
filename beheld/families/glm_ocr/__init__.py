"""GLM-OCR: GLM-4V's text model after a tower with normalized attention and no learned positions."""

from __future__ import annotations

from beheld.families.family import IMAGE_AND_VIDEO, Family, KnownCheckpoint, ReferenceOptions

FAMILY = Family(
    model_types=("glm_ocr",),
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
