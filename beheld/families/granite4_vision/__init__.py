"""Granite 4 Vision: images in tiles, whose features enter several layers of Granite."""

from __future__ import annotations

from beheld.families.family import IMAGE, Family, KnownCheckpoint

FAMILY = Family(
    model_types=("granite4_vision",),
    tested=(
        KnownCheckpoint(
            "granite4_vision",
            "Granite4VisionForConditionalGeneration",
            "ibm-granite/granite-4.0-3b-vision",
            IMAGE,
            "tiles; the tower enters eight text layers",
            by_census=True,
        ),
    ),
    calls=("hermes", "granite"),
)
