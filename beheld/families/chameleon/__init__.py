"""Chameleon: images become tokens of a codebook."""

from __future__ import annotations

from beheld.families.family import IMAGE, Family, KnownCheckpoint, ReferenceOptions

FAMILY = Family(
    model_types=("chameleon",),
    tested=(
        KnownCheckpoint(
            "chameleon",
            "ChameleonForConditionalGeneration",
            "facebook/chameleon-7b",
            IMAGE,
            "images become tokens of a codebook, which answers may not hold; messages cannot be continued",
            on_gpu=True,
        ),
    ),
    reference=ReferenceOptions(merges_inside=True),
)
