"""Gemma 3n: per-layer embeddings; layers that read other layers' caches."""

from __future__ import annotations

from beheld.families.family import IMAGE_AND_AUDIO, Family, KnownCheckpoint, ReferenceOptions

FAMILY = Family(
    model_types=("gemma3n",),
    tested=(
        KnownCheckpoint(
            "gemma3n",
            "Gemma3nForConditionalGeneration",
            "google/gemma-3n-E2B-it",
            IMAGE_AND_AUDIO,
            "per-layer embeddings; layers that read another's cache; its tower needs the package timm; reads the "
            "first 30 s of an audio, each as if it were the only one of its prompt",
            on_gpu=True,
        ),
    ),
    package="timm",
    reference=ReferenceOptions(completed_later=frozenset(("audio",))),
)
