"""Qwen3.5: three of four layers have the gated delta rule instead of attention."""

from __future__ import annotations

from beheld.core.grounding import Grounding
from beheld.families._shared.gated_delta.config import delta_state
from beheld.families.family import IMAGE_AND_VIDEO, Family, KnownCheckpoint

FAMILY = Family(
    model_types=("qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text"),
    tested=(
        KnownCheckpoint(
            "qwen3_5",
            "Qwen3_5ForConditionalGeneration",
            "Qwen/Qwen3.5-4B",
            IMAGE_AND_VIDEO,
            "gated delta rule in three of four layers; three-axis positions",
            on_gpu=True,
        ),
        KnownCheckpoint(
            "qwen3_5_moe",
            "Qwen3_5MoeForConditionalGeneration",
            "Qwen/Qwen3.5-35B-A3B",
            IMAGE_AND_VIDEO,
            "as Qwen3.5; experts",
            on_gpu=True,
        ),
    ),
    state=delta_state,
    calls=("qwen3_coder",),
    reasoning=("think",),
    grounding=Grounding("json", 1000),
)
