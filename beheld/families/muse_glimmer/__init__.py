"""Muse Glimmer: images and videos in windows, before layers of which every fourth has no positions."""

from __future__ import annotations

from beheld.families.family import IMAGE_AND_VIDEO, Family, KnownCheckpoint

FAMILY = Family(
    model_types=("muse_glimmer",),
    tested=(
        KnownCheckpoint(
            "muse_glimmer",
            "MuseGlimmerForConditionalGeneration",
            "meta-models/Muse-Glimmer-30B",
            IMAGE_AND_VIDEO,
            "a video's frames with their times; sliding and full layers",
            by_census=True,
        ),
    ),
    calls=("muse",),
    reasoning=("muse_glimmer",),
)
