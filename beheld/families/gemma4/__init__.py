"""Gemma 4: per-layer embeddings; layers that read other layers' caches."""

from __future__ import annotations

from beheld.core.grounding import Grounding
from beheld.families.family import ALL, Family, KnownCheckpoint, ReferenceOptions, ShortName

FAMILY = Family(
    model_types=("gemma4", "gemma4_text"),
    short_names=(
        ShortName("gemma4-e2b", "google/gemma-4-E2B-it", "gemma4", "Apache-2.0", 5.1, "images, videos and speech", 2.8),
        ShortName("gemma4-e4b", "google/gemma-4-E4B-it", "gemma4", "Apache-2.0", 8.0, "images, videos and speech", 3.5),
    ),
    tested=(
        KnownCheckpoint(
            "gemma4",
            "Gemma4ForConditionalGeneration",
            "google/gemma-4-E2B-it",
            ALL,
            "per-layer embeddings; layers that read another's cache; reads the first 30 s of an audio",
            tolerance=0.0002,
        ),
    ),
    reference=ReferenceOptions(attention=None),
    calls=("gemma4",),
    reasoning=("gemma4",),
    grounding=Grounding("json", 1000, rows_first=True),
)
