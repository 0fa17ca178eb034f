"""HyperCLOVA X SEED Think: Qwen2.5-VL's tower before HyperCLOVA X."""

from __future__ import annotations

from beheld.families.family import IMAGE_AND_VIDEO, UNDEFINED, Family, KnownCheckpoint, OldestTransformers

FAMILY = Family(
    model_types=("hyperclovax_vision_v2",),
    tested=(
        KnownCheckpoint(
            "hyperclovax_vision_v2",
            "HyperCLOVAXVisionV2ForConditionalGeneration",
            "naver-hyperclovax/HyperCLOVAX-SEED-Think-32B",
            IMAGE_AND_VIDEO,
            "",
            by_census=True,
        ),
    ),
    oldest=OldestTransformers("5.18", UNDEFINED),
    calls=("glm45", "hermes"),
    reasoning=("think",),
)
