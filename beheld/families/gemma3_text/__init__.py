"""Gemma 3, text only: sliding and full layers."""

from __future__ import annotations

from beheld.families.family import Family, GGUFLayout, KnownCheckpoint

FAMILY = Family(
    model_types=("gemma3_text",),
    tested=(
        KnownCheckpoint("gemma3_text", "Gemma3ForCausalLM", "google/gemma-3-1b-it", note="sliding and full layers"),
    ),
    gguf=GGUFLayout(
        "gemma3",
        "Gemma3ForCausalLM",
        parts={
            "ffn_norm": "pre_feedforward_layernorm",
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        entries={"sliding_window": "attention.sliding_window"},
        adapt="gguf:config",
        adapted_from="gguf:entries",
        norms_plus_one=True,
    ),
    calls=("functiongemma", "pythonic"),
)
