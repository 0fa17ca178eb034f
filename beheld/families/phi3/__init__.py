"""Phi-3 and Phi-4 mini, text only: queries, keys and values of one matrix, gate and up of another."""

from __future__ import annotations

from beheld.families.family import Family, GGUFLayout

FAMILY = Family(
    model_types=("phi3",),
    gguf=GGUFLayout(
        "phi3",
        "Phi3ForCausalLM",
        parts={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        entries={
            "sliding_window": "attention.sliding_window",
            "original_max_position_embeddings": "rope.scaling.original_context_length",
        },
    ),
    calls=("phi4_mini_json",),
    reasoning=("think",),
)
