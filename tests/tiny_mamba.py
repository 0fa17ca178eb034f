"""Small random checkpoints of families with the state spaces of Mamba-1 and Mamba-2.

Each is laid out as the checkpoint that its function names; see tiny.py for what they have in common.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import tiny
from tests import tiny_text as text
from tests.tiny_media import FORMS, QWEN_TURN
from tests.tiny_more import language

SEEDS: dict[str, int] = {
    "falcon_h1": 1,
    "granitemoehybrid": 1,
    "jamba": 1,
    "nemotron_h": 2,
}
"""Family -> the seed of its weights; chosen so that greedy choices are clear (see oracle/test_tiny.py)."""

# Sizes of Mamba-2: 8 heads of 16, which share B and C by fours.
HEADS = {
    "mamba_chunk_size": 16,
    "mamba_d_conv": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 12,
    "mamba_expand": 2,
    "mamba_n_groups": 2,
    "mamba_n_heads": 8,
}


def make_granitemoehybrid(path: Path) -> None:
    """As ibm-granite/granite-4.0-h-tiny: no positions, multipliers everywhere, experts and a shared one."""
    _write(
        path, "granitemoehybrid", "GraniteMoeHybridForCausalLM",
        attention_multiplier=0.3, embedding_multiplier=3, intermediate_size=32,
        layer_types=["mamba", "mamba", "attention", "mamba"], logits_scaling=0.7, num_experts_per_tok=2,
        num_hidden_layers=4, num_local_experts=4, position_embedding_type="nope", residual_multiplier=0.6,
        shared_intermediate_size=48, **HEADS,
    )  # fmt: skip


def make_falcon_h1(path: Path) -> None:
    """As tiiuae/Falcon-H1-1.5B-Instruct: attention and Mamba-2 in every layer, a multiplier at every place."""
    sizes = HEADS | {"mamba_d_ssm": 96, "mamba_d_head": 12}
    _write(
        path, "falcon_h1", "FalconH1ForCausalLM",
        attention_in_multiplier=0.9, attention_out_multiplier=0.8, embedding_multiplier=1.7, key_multiplier=0.6,
        lm_head_multiplier=0.8, mamba_norm_before_gate=False, mamba_rms_norm=False, mlp_multipliers=[0.9, 1.2],
        num_hidden_layers=3, ssm_in_multiplier=1.3, ssm_multipliers=[0.8, 0.9, 0.7, 1.1, 0.6], ssm_out_multiplier=0.9,
        **sizes,
    )  # fmt: skip


def make_nemotron_h(path: Path) -> None:
    """As nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16: layers of one part each, experts without gates."""
    _write(
        path, "nemotron_h", "NemotronHForCausalLM",
        chunk_size=16, conv_kernel=4, hybrid_override_pattern="ME*-M", layer_norm_epsilon=1e-5, mamba_head_dim=16,
        mamba_num_heads=8, mlp_hidden_act="relu2", moe_intermediate_size=32, moe_shared_expert_intermediate_size=48,
        n_group=1, n_groups=2, n_routed_experts=4, num_experts_per_tok=2, num_hidden_layers=5, ssm_state_size=12,
        routed_scaling_factor=2.5, topk_group=1,
    )  # fmt: skip


def make_jamba(path: Path) -> None:
    """As ai21labs/AI21-Jamba-Mini-1.7: one layer of four is attention, every other one has experts."""
    _write(
        path, "jamba", "JambaForCausalLM",
        attn_layer_offset=1, attn_layer_period=4, expert_layer_offset=1, expert_layer_period=2, mamba_d_conv=4,
        mamba_d_state=8, mamba_dt_rank=4, mamba_expand=2, num_experts=4, num_experts_per_tok=2, num_hidden_layers=4,
    )  # fmt: skip


def _write(path: Path, kind: str, architecture: str, **own: Any) -> None:
    (path / "chat_template.jinja").write_text(text.QWEN_TEXT_CHAT, encoding="utf-8")
    ids = text.write_qwen_tokenizer(path, text.QWEN_TEXT_SPECIALS, "<|im_end|>", {})
    config = language(kind, architecture, **{"tie_word_embeddings": False} | own)
    generation = tiny._qwen_generation(ids)
    tiny._write_model(path, config, generation, ids, seed=SEEDS[kind], keep=("<|im_end|>",), adjust=_long_memory)


def _long_memory(model: Any) -> None:
    """Let states decay slowly, so that what stands far before the end decides too, at different rates."""
    for name, weight in model.named_parameters():
        if name.endswith("A_log"):
            weight.sub_(3.0)


TINY: dict[str, Callable[[Path], None]] = {
    "falcon_h1": make_falcon_h1,
    "granitemoehybrid": make_granitemoehybrid,
    "jamba": make_jamba,
    "nemotron_h": make_nemotron_h,
}
IMAGE_FAMILIES = ()
VIDEO_FAMILIES = ()
TEXT_FAMILIES = tuple(TINY)
FORMS.update(dict.fromkeys(TINY, QWEN_TURN))
