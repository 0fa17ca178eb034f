"""Qwen2: text only."""

from __future__ import annotations

from beheld.families.family import Family, GGUFLayout, KnownCheckpoint

FAMILY = Family(
    model_types=("qwen2",),
    tested=(
        KnownCheckpoint(
            "qwen2",
            "Qwen2ForCausalLM",
            "Qwen/Qwen2-0.5B-Instruct",
        ),
    ),
    gguf=GGUFLayout("qwen2", "Qwen2ForCausalLM", ("qwen2vl",)),
    calls=("hermes",),
    reasoning=("think",),
)
