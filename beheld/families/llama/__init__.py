"""Llama: text only."""

from __future__ import annotations

from beheld.families.family import Family, GGUFLayout, KnownCheckpoint

FAMILY = Family(
    model_types=("llama",),
    tested=(
        KnownCheckpoint(
            "llama",
            "LlamaForCausalLM",
            "meta-llama/Llama-2-7b-chat-hf",
        ),
    ),
    gguf=GGUFLayout(
        "llama",
        "LlamaForCausalLM",
        biases={"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"},
        permuted={"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"},
        written_from=("mistral",),
    ),
    calls=("pythonic", "llama3_json"),
    reasoning=("think",),
)
