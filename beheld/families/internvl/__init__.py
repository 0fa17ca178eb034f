"""InternVL in transformers' layout: images in tiles, videos as images."""

from __future__ import annotations

from beheld.core.grounding import Grounding
from beheld.families.family import IMAGE_AND_VIDEO, Family, KnownCheckpoint, ShortName

FAMILY = Family(
    model_types=("internvl",),
    short_names=(
        ShortName(
            "internvl3.5-1b",
            "OpenGVLab/InternVL3_5-1B-HF",
            "internvl",
            "Apache-2.0",
            1.1,
            "images and documents on a laptop",
        ),
        ShortName(
            "internvl3.5-8b",
            "OpenGVLab/InternVL3_5-8B-HF",
            "internvl",
            "Apache-2.0",
            8.5,
            "images, documents and videos",
        ),
    ),
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
    grounding=Grounding("ref box", 1000),
)
