"""SmolVLM: images in tiles, videos as images."""

from __future__ import annotations

from beheld.families.family import IMAGE_AND_VIDEO, Family, KnownCheckpoint, ReferenceOptions

FAMILY = Family(
    model_types=("smolvlm",),
    tested=(
        KnownCheckpoint(
            "smolvlm",
            "SmolVLMForConditionalGeneration",
            "HuggingFaceTB/SmolVLM2-2.2B-Instruct",
            IMAGE_AND_VIDEO,
            "tiles; each video is described as if it were the only one of its prompt; its processor needs the "
            "package num2words",
            joined=True,
        ),
    ),
    videos_as_images=True,
    reference=ReferenceOptions(joins_media=True, nests_videos=True),
)
