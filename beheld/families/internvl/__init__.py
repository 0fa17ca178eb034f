"""InternVL in transformers' layout: images in tiles, videos as images."""

from __future__ import annotations

from beheld.families.family import IMAGE_AND_VIDEO, Family, KnownCheckpoint

FAMILY = Family(
    model_types=("internvl",),
    tested=(
        KnownCheckpoint(
            "internvl",
            "InternVLForConditionalGeneration",
            "OpenGVLab/InternVL3-1B-hf",
            IMAGE_AND_VIDEO,
            "tiles; over gpt-oss, too",
        ),
    ),
    videos_as_images=True,
    calls=("hermes",),
    reasoning=("think",),
)
