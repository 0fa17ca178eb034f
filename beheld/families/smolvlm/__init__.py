"""SmolVLM: images in tiles, videos as images."""

from __future__ import annotations

from beheld.families.family import IMAGE_AND_VIDEO, Family, KnownCheckpoint, ReferenceOptions, ShortName

FAMILY = Family(
    model_types=("smolvlm",),
    short_names=(
        ShortName(
            "smolvlm2-2b",
            "HuggingFaceTB/SmolVLM2-2.2B-Instruct",
            "smolvlm",
            "Apache-2.0",
            2.2,
            "images and short videos on a small machine",
        ),
    ),
    tested=(
        KnownCheckpoint(
            "smolvlm",
            "SmolVLMForConditionalGeneration",
            "HuggingFaceTB/SmolVLM2-2.2B-Instruct",
            IMAGE_AND_VIDEO,
            "tiles; each video is described as if it were the only one of its prompt",
            joined=True,
        ),
    ),
    videos_as_images=True,
    reference=ReferenceOptions(joins_media=True, nests_videos=True),
)
