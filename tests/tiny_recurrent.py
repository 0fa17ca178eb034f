"""Small random checkpoints of families with recurrent layers.

Each is laid out as the checkpoint that its function names; see tiny.py for what they have in common.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import tiny
from tests import tiny_text as text
from tests.tiny_grid import grid_pixels
from tests.tiny_media import FORMS, MARKERS, QWEN_MARKERS, QWEN_TURN
from tests.tiny_more import language, qwen_tokens

SEEDS: dict[str, int] = {
    "qwen3_5": 3,
    "qwen3_5_moe": 1,
    "qwen3_next": 1,
}
"""Family -> the seed of its weights; chosen so that greedy choices are clear (see oracle/test_tiny.py)."""

DELTA = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention", "full_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 12,
    "num_hidden_layers": 5,
}
EXPERTS = {
    "moe_intermediate_size": 48,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 48,
}


def make_qwen3_5(path: Path) -> None:
    """As Qwen/Qwen3.5-4B: layers with the gated delta rule among attention with gates, a tower without deeper features.

    As in the real one, a quarter of each head is turned, and the last layer is attention.
    """
    _qwen3_5(path, "qwen3_5", "Qwen3_5ForConditionalGeneration", {})


def make_qwen3_5_moe(path: Path) -> None:
    """As Qwen/Qwen3.5-35B-A3B: the same with experts."""
    _qwen3_5(path, "qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", EXPERTS)


def _qwen3_5(path: Path, kind: str, architecture: str, own: dict[str, Any]) -> None:
    marks = text.QWEN_SPECIALS[3:]
    ids = qwen_tokens(path, "Qwen3VLProcessor", marks, {"chat_template": text.QWEN_VISION_CHAT})
    rope = {
        "mrope_interleaved": True,
        "mrope_section": [2, 1, 1],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000.0,
        "rope_type": "default",
    }
    config = {
        "architectures": [architecture],
        "image_token_id": ids["<|image_pad|>"],
        "model_type": kind,
        "text_config": language(
            f"{kind}_text", architecture, head_dim=32, partial_rotary_factor=0.25, rope_parameters=rope, **DELTA, **own
        ),
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "video_token_id": ids["<|video_pad|>"],
        "vision_config": {
            "deepstack_visual_indexes": [],
            "depth": 3,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 32,
            "in_channels": 3,
            "intermediate_size": 48,
            "model_type": kind,
            "num_heads": 2,
            "num_position_embeddings": 64,
            "out_hidden_size": 64,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        "vision_end_token_id": ids["<|vision_end|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
    }
    grid_pixels(path, "Qwen3VLProcessor", "Qwen2VLImageProcessor", "Qwen3VLVideoProcessor", 14)
    generation = tiny._qwen_generation(ids)
    tiny._write_model(path, config, generation, ids, seed=SEEDS[kind], keep=("<|im_end|>",), adjust=_long_memory)


def make_qwen3_next(path: Path) -> None:
    """As Qwen/Qwen3-Next-80B-A3B-Instruct: joined projections, experts beside a shared one."""
    (path / "chat_template.jinja").write_text(text.QWEN_TEXT_CHAT, encoding="utf-8")
    ids = text.write_qwen_tokenizer(path, text.QWEN_TEXT_SPECIALS, "<|im_end|>", {})
    config = language(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        head_dim=32,
        mlp_only_layers=[1],
        norm_topk_prob=True,
        partial_rotary_factor=0.25,
        tie_word_embeddings=False,
        **DELTA,
        **EXPERTS,
    )
    tiny._write_model(
        path,
        config,
        tiny._qwen_generation(ids),
        ids,
        seed=SEEDS["qwen3_next"],
        keep=("<|im_end|>",),
        adjust=_long_memory,
    )


def _long_memory(model: Any) -> None:
    """Let states decay as slowly as trained ones, so that what stands far before the end decides too.

    Norms that multiply by one plus their weight have weights around zero, but for those with gates.
    """
    for name, weight in model.named_parameters():
        if name.endswith("A_log"):
            weight.sub_(4.0)
        elif "norm" in name and "linear_attn.norm" not in name and "visual" not in name:
            weight.sub_(1.0)


TINY: dict[str, Callable[[Path], None]] = {
    "qwen3_5": make_qwen3_5,
    "qwen3_5_moe": make_qwen3_5_moe,
    "qwen3_next": make_qwen3_next,
}
IMAGE_FAMILIES = ("qwen3_5", "qwen3_5_moe")
VIDEO_FAMILIES = IMAGE_FAMILIES
TEXT_FAMILIES = ("qwen3_next",)
FORMS.update(dict.fromkeys(TINY, QWEN_TURN))
MARKERS.update(dict.fromkeys(IMAGE_FAMILIES, QWEN_MARKERS))
