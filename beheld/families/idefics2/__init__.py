"""Idefics 2: images at their own shape, read by learned queries, before Mistral."""

from __future__ import annotations

from beheld.families.family import IMAGE, Family, KnownCheckpoint

FAMILY = Family(
    model_types=("idefics2",),
    tested=(
        KnownCheckpoint(
            "idefics2",
            "Idefics2ForConditionalGeneration",
            "HuggingFaceM4/idefics2-8b",
            IMAGE,
            "images are read by learned queries; four tiles where do_image_splitting is set",
            by_census=True,
        ),
    ),
)
