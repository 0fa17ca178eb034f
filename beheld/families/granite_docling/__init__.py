"""Granite Docling: pages in tiles, before Granite."""

from __future__ import annotations

from beheld.families.family import IMAGE, UNDEFINED, Family, KnownCheckpoint, OldestTransformers

FAMILY = Family(
    model_types=("granite_docling",),
    tested=(
        KnownCheckpoint(
            "granite_docling",
            "GraniteDoclingForConditionalGeneration",
            "ibm-granite/granite-for-docling-500m",
            IMAGE,
            "tiles; the tower also enters the first layers",
            by_census=True,
        ),
    ),
    oldest=OldestTransformers("5.23", UNDEFINED),
)
