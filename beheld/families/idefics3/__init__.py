"""Idefics 3: images in tiles."""

from __future__ import annotations

from beheld.families.family import IMAGE, Family, KnownCheckpoint

FAMILY = Family(
    model_types=("idefics3",),
    tested=(
        KnownCheckpoint(
            "idefics3", "Idefics3ForConditionalGeneration", "HuggingFaceM4/Idefics3-8B-Llama3", IMAGE, "tiles"
        ),
    ),
)
