"""Llama 4: images in tiles; chunked attention; mixture of experts."""

from __future__ import annotations

from beheld.families.family import IMAGE, Family, KnownCheckpoint, ReferenceOptions

FAMILY = Family(
    model_types=("llama4",),
    tested=(
        KnownCheckpoint(
            "llama4",
            "Llama4ForConditionalGeneration",
            "meta-llama/Llama-4-Scout-17B-16E-Instruct",
            IMAGE,
            "tiles; attention in chunks; experts; layers without positions, whose queries grow",
            on_gpu=True,
        ),
    ),
    reference=ReferenceOptions(
        completed_later=frozenset(("image",)),
        # Not there in transformers 5.24.
        asks_of_text=("image_outputs",),
    ),
    calls=("pythonic", "llama3_json"),
)
