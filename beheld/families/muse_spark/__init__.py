"""Muse Spark: Muse Glimmer's tower before experts; it takes no audio here yet."""

from __future__ import annotations

from beheld.families.family import IMAGE_AND_VIDEO, UNDEFINED, Family, KnownCheckpoint, OldestTransformers

FAMILY = Family(
    model_types=("muse_spark",),
    tested=(
        KnownCheckpoint(
            "muse_spark",
            "MuseSparkForConditionalGeneration",
            "meta-models/Muse-Spark-Open-816B-A42B",
            IMAGE_AND_VIDEO,
            "a video's frames with their times; experts; sliding and full layers; no audio",
            by_census=True,
        ),
    ),
    oldest=OldestTransformers("5.20", UNDEFINED),
    placeholders=lambda config: {"image": config.image_token_id, "video": config.video_token_id},
    calls=("muse",),
    reasoning=("muse",),
)
