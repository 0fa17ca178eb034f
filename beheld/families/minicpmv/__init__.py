"""MiniCPM-V 2.6: slices of an image, each resampled to 64 embeddings, before Qwen2."""

from __future__ import annotations

from beheld.families.family import IMAGE_AND_VIDEO, Definition, Family, KnownCheckpoint

FAMILY = Family(
    model_types=("minicpmv",),
    architectures=("MiniCPMV",),
    tested=(
        KnownCheckpoint(
            "minicpmv",
            "MiniCPMV",
            "openbmb/MiniCPM-V-2_6",
            IMAGE_AND_VIDEO,
            "version 2.6; other versions are refused, and embeddings in place of images or videos",
        ),
    ),
    placeholder_tokens={"image": "<unk>"},
    videos_as_images=True,
    definition=Definition(config="config:MiniCPMVConfig", model="modeling:MiniCPMVForConditionalGeneration"),
    calls=("hermes",),
    reasoning=("think",),
)
