"""Mistral: text only, with sliding layers."""

from __future__ import annotations

from beheld.families.family import Family, KnownCheckpoint

FAMILY = Family(
    model_types=("mistral",),
    tested=(
        KnownCheckpoint(
            "mistral",
            "MistralForCausalLM",
            "mistralai/Mistral-7B-v0.1",
            note="sliding layers",
        ),
    ),
    calls=("mistral",),
    reasoning=("mistral",),
)
