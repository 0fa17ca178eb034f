"""Molmo 2: all images of a prompt attend to each other."""

from __future__ import annotations

from beheld.core.grounding import Grounding
from beheld.families.family import (
    IMAGE_AND_VIDEO,
    UNDEFINED,
    Family,
    KnownCheckpoint,
    OldestTransformers,
    ReferenceOptions,
)

FAMILY = Family(
    model_types=("molmo2",),
    tested=(
        KnownCheckpoint(
            "molmo2",
            "Molmo2ForConditionalGeneration",
            "allenai/Molmo2-8B",
            IMAGE_AND_VIDEO,
            "all images of a prompt see each other, in one step; vocabulary in two parts; one video",
            joined=True,
            on_gpu=True,
        ),
    ),
    oldest=OldestTransformers("5.20", UNDEFINED),
    both_ways="joint",
    joint_tokens=(
        "<frame_end>",
        "<frame_start>",
        "<im_col>",
        "<im_end>",
        "<im_low>",
        "<im_patch>",
        "<im_start>",
        "<low_res_im_start>",
    ),
    reference=ReferenceOptions(
        joins_media=True, adds_to_placeholder=True, completed_later=frozenset(("image", "video"))
    ),
    grounding=Grounding("point lists", 1000, names_images=True),
)
