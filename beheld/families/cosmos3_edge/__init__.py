"""Cosmos 3 Edge: SigLIP 2's tower and a small language model with three-axis positions."""

from __future__ import annotations

from beheld.families.family import IMAGE_AND_VIDEO, Family, KnownCheckpoint

FAMILY = Family(
    model_types=("cosmos3_edge",),
    tested=(
        KnownCheckpoint(
            "cosmos3_edge",
            "Cosmos3EdgeForConditionalGeneration",
            "nvidia/Cosmos3-Edge-Reasoner",
            IMAGE_AND_VIDEO,
            "three-axis positions; frames with their times",
            by_census=True,
        ),
    ),
)
