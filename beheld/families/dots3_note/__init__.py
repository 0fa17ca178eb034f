"""dots3.note, which cannot be run yet."""

from __future__ import annotations

from beheld.families.family import Family

FAMILY = Family(
    model_types=("dots3_note",),
    refused=(
        "an indexer chooses the positions that its latent layers see, and other latent layers have a window; neither "
        "is computed here yet"
    ),
)
