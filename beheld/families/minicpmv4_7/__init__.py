"""MiniCPM-V 4.7: as 4.6, with positions on a canvas of the image and its slices."""

from __future__ import annotations

from beheld.families._shared.gated_delta.config import delta_state
from beheld.families.family import IMAGE_AND_VIDEO, UNDEFINED, Family, KnownCheckpoint, OldestTransformers

FAMILY = Family(
    model_types=("minicpmv4_7",),
    tested=(
        KnownCheckpoint(
            "minicpmv4_7",
            "MiniCPMV4_7ForConditionalGeneration",
            "openbmb/MiniCPM-V-4.7",
            IMAGE_AND_VIDEO,
            "gated delta rule in three of four layers; an overview and slices, numbered, with positions on one canvas",
            by_census=True,
        ),
    ),
    oldest=OldestTransformers("5.18", UNDEFINED),
    state=delta_state,
    calls=("qwen3_coder",),
    reasoning=("think",),
)
