"""Bee: LLaVA-OneVision's layout with a wider projector between SigLIP and Qwen3; every image is cut into tiles."""

from __future__ import annotations

from beheld.families.family import IMAGE, Definition, Family, KnownCheckpoint

FAMILY = Family(
    model_types=("bee",),
    architectures=("BeeForConditionalGeneration",),
    tested=(
        KnownCheckpoint(
            "bee",
            "BeeForConditionalGeneration",
            "Open-Bee/Bee-8B-RL",
            IMAGE,
            "tiles for every image, Qwen3 text",
        ),
    ),
    definition=Definition(config="config:BeeConfig", model="modeling:BeeForConditionalGeneration"),
    placeholders=lambda config: {"image": config.image_token_index},
    calls=("hermes",),
    reasoning=("think",),
)
