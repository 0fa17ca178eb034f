"""SmolLM3: every fourth layer does not rotate queries and keys."""

from __future__ import annotations

from beheld.families.family import Family, GGUFLayout

FAMILY = Family(
    model_types=("smollm3",),
    gguf=GGUFLayout(
        "smollm3",
        "SmolLM3ForCausalLM",
        biases={"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"},
        permuted={"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"},
        added={"no_rope_layer_interval": 4, "use_sliding_window": False},
    ),
    calls=("hermes",),
    reasoning=("think",),
)
