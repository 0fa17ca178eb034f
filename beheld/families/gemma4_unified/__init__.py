"""Gemma 4 without towers: patches are projected into the prompt; it takes no audio here yet."""

from __future__ import annotations

from beheld.families.family import IMAGE_AND_VIDEO, Family, KnownCheckpoint, ReferenceOptions

FAMILY = Family(
    model_types=("gemma4_unified",),
    tested=(
        KnownCheckpoint(
            "gemma4_unified",
            "Gemma4UnifiedForConditionalGeneration",
            "google/gemma-4-12B-it",
            IMAGE_AND_VIDEO,
            "no towers; each image or frame is read both ways, in one step; no audio",
            by_census=True,
        ),
    ),
    placeholders=lambda config: {"image": config.image_token_id, "video": config.video_token_id},
    both_ways="whole media",
    reference=ReferenceOptions(attention=None),
    calls=("gemma4",),
    reasoning=("gemma4",),
)
