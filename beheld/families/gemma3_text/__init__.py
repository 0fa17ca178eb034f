"""Gemma 3, text only: sliding and full layers."""

from __future__ import annotations

from beheld.families.family import Family, KnownCheckpoint

FAMILY = Family(
    model_types=("gemma3_text",),
    tested=(
        KnownCheckpoint("gemma3_text", "Gemma3ForCausalLM", "google/gemma-3-1b-it", note="sliding and full layers"),
    ),
)
