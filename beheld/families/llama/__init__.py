"""Llama: text only."""

from __future__ import annotations

from beheld.families.family import Family, KnownCheckpoint

FAMILY = Family(
    model_types=("llama",),
    tested=(
        KnownCheckpoint(
            "llama",
            "LlamaForCausalLM",
            "meta-llama/Llama-2-7b-chat-hf",
        ),
    ),
)
