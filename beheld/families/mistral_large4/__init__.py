"""Mistral Large 4, which cannot be run yet."""

from __future__ import annotations

from beheld.families.family import Family

FAMILY = Family(
    model_types=("mistral_large4",),
    refused=(
        "an indexer chooses the positions that its latent layers see, layers may read another's latents, and queries "
        "are scaled by head and position; none of the three is computed here yet"
    ),
)
