"""Gemma 2: soft caps; sliding and full layers."""

from __future__ import annotations

from beheld.families.family import Family, KnownCheckpoint

FAMILY = Family(
    model_types=("gemma2",),
    tested=(
        KnownCheckpoint(
            "gemma2", "Gemma2ForCausalLM", "google/gemma-2-2b-it", note="soft caps; sliding and full layers"
        ),
    ),
)
