"""Qwen3 and what is made of it: embedders, and rerankers whose prompt is `template_qwen3_reranker.jinja`."""

from __future__ import annotations

from beheld.families.family import Family, GGUFLayout

FAMILY = Family(
    model_types=("qwen3",),
    gguf=GGUFLayout("qwen3", "Qwen3ForCausalLM", ("qwen3vl",), biases={"attention_bias": "blk.0.attn_q.bias"}),
    calls=("qwen3_coder", "hermes"),
    reasoning=("think",),
)
