"""Idefics 3: images in tiles."""

from __future__ import annotations

from beheld.families.family import IMAGE, Family, KnownCheckpoint, ShortName

FAMILY = Family(
    model_types=("idefics3",),
    short_names=(
        ShortName(
            "smolvlm-256m",
            "HuggingFaceTB/SmolVLM-256M-Instruct",
            "idefics3",
            "Apache-2.0",
            0.26,
            "short descriptions and questions on a laptop",
        ),
        ShortName(
            "smolvlm-500m",
            "HuggingFaceTB/SmolVLM-500M-Instruct",
            "idefics3",
            "Apache-2.0",
            0.51,
            "short descriptions and questions on a laptop",
        ),
    ),
    tested=(
        KnownCheckpoint(
            "idefics3", "Idefics3ForConditionalGeneration", "HuggingFaceM4/Idefics3-8B-Llama3", IMAGE, "tiles"
        ),
    ),
)
