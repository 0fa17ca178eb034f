"""Qwen2 with experts, one of which sees every token."""

from __future__ import annotations

from beheld.families.family import Family, GGUFLayout

FAMILY = Family(
    model_types=("qwen2_moe",),
    gguf=GGUFLayout(
        "qwen2moe",
        "Qwen2MoeForCausalLM",
        parts={
            "ffn_gate_inp": "mlp.gate",
            "ffn_gate_exps": "mlp.experts.{}.gate_proj",
            "ffn_up_exps": "mlp.experts.{}.up_proj",
            "ffn_down_exps": "mlp.experts.{}.down_proj",
            "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
            "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
            "ffn_up_shexp": "mlp.shared_expert.up_proj",
            "ffn_down_shexp": "mlp.shared_expert.down_proj",
        },
        added={"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": False},
        entries={
            "num_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
            "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        },
    ),
    calls=("hermes",),
)
