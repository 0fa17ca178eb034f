"""Qwen3 with experts."""

from __future__ import annotations

from beheld.families.family import Family, GGUFLayout

FAMILY = Family(
    model_types=("qwen3_moe",),
    gguf=GGUFLayout(
        "qwen3moe",
        "Qwen3MoeForCausalLM",
        parts={
            "ffn_gate_inp": "mlp.gate",
            "ffn_gate_exps": "mlp.experts.{}.gate_proj",
            "ffn_up_exps": "mlp.experts.{}.up_proj",
            "ffn_down_exps": "mlp.experts.{}.down_proj",
        },
        added={"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True},
        entries={
            "num_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
        },
    ),
    calls=("qwen3_coder", "hermes"),
    reasoning=("think",),
)
