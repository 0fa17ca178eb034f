"""Cosmos 3 Omni: Qwen3-VL under a type of its own; only the part that reads runs here."""

from __future__ import annotations

from beheld.families.family import IMAGE_AND_VIDEO, Family, KnownCheckpoint

FAMILY = Family(
    model_types=("cosmos3_omni",),
    tested=(
        KnownCheckpoint(
            "cosmos3_omni",
            "Cosmos3OmniForConditionalGeneration",
            "nvidia/Cosmos3-Nano",
            IMAGE_AND_VIDEO,
            "the part that reads and reasons, as Qwen3-VL; nothing that makes images or videos",
            by_census=True,
        ),
    ),
    reasoning=("think",),
)
