"""Gemma 3: attention within an image runs both ways."""

from __future__ import annotations

from beheld.families.family import IMAGE, Family, KnownCheckpoint, ShortName

FAMILY = Family(
    model_types=("gemma3",),
    short_names=(
        ShortName(
            "gemma3-4b", "google/gemma-3-4b-it", "gemma3", "Gemma Terms of Use (gated)", 4.3, "images in many languages"
        ),
        ShortName(
            "gemma3-12b",
            "google/gemma-3-12b-it",
            "gemma3",
            "Gemma Terms of Use (gated)",
            12.2,
            "images in many languages",
        ),
        ShortName(
            "gemma3-27b",
            "google/gemma-3-27b-it",
            "gemma3",
            "Gemma Terms of Use (gated)",
            27.4,
            "images in many languages",
        ),
    ),
    tested=(
        KnownCheckpoint(
            "gemma3",
            "Gemma3ForConditionalGeneration",
            "google/gemma-3-4b-it",
            IMAGE,
            "each image is read both ways, in one step",
            on_gpu=True,
        ),
    ),
    both_ways="media",
)
