"""dots3.note, which cannot be run yet."""

from __future__ import annotations

from beheld.families.family import Family

FAMILY = Family(
    model_types=("dots3_note",),
    refused=(
        "latent layers with a window are not computed here yet; in its other latent layers an indexer chooses the "
        "positions"
    ),
)
