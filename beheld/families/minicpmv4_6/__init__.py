"""MiniCPM-V 4.6: Qwen3.5's language model with a tower that packs slices."""

from __future__ import annotations

from beheld.families._shared.gated_delta.config import delta_state
from beheld.families.family import IMAGE_AND_VIDEO, Family, KnownCheckpoint

FAMILY = Family(
    model_types=("minicpmv4_6",),
    tested=(
        KnownCheckpoint(
            "minicpmv4_6",
            "MiniCPMV4_6ForConditionalGeneration",
            "openbmb/MiniCPM-V-4.6",
            IMAGE_AND_VIDEO,
            "gated delta rule in three of four layers; an overview and slices, numbered",
            by_census=True,
        ),
    ),
    state=delta_state,
    calls=("qwen3_coder",),
    reasoning=("think",),
)
