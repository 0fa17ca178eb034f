"""MiniCPM-OCR: pages in slices, before Qwen3.5's language model."""

from __future__ import annotations

from beheld.families._shared.gated_delta.config import delta_state
from beheld.families.family import IMAGE_AND_VIDEO, UNDEFINED, Family, KnownCheckpoint, OldestTransformers

FAMILY = Family(
    model_types=("minicpm_ocr",),
    tested=(
        KnownCheckpoint(
            "minicpm_ocr",
            "MiniCPMOcrForConditionalGeneration",
            "openbmb/MiniCPM-OCR",
            IMAGE_AND_VIDEO,
            "gated delta rule in three of four layers; an overview and slices, numbered",
            by_census=True,
        ),
    ),
    oldest=OldestTransformers("5.21", UNDEFINED),
    state=delta_state,
    reasoning=("think",),
)
