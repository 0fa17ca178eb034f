"""Small random checkpoints of text models with peculiar attention: sinks, and latents in place of keys and values.

Each is laid out as the checkpoint that its function names; see tiny.py for what they have in common.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import tiny
from tests import tiny_text as text
from tests.tiny_media import FORMS

SEEDS: dict[str, int] = {"gpt_oss": 2}
"""Family -> the seed of its weights; chosen so that greedy choices are clear (see oracle/test_tiny.py)."""

HARMONY_SPECIALS = (
    "<|startoftext|>",
    "<|endoftext|>",
    "<|return|>",
    "<|constrain|>",
    "<|channel|>",
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|call|>",
)
HARMONY_TURN = "<|start|>user<|message|>{}<|end|><|start|>assistant"
HARMONY_CHAT = (
    "{%- for message in messages -%}{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' -}}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|start|>assistant' -}}{%- endif -%}"
)


def make_gpt_oss(path: Path) -> None:
    """As openai/gpt-oss-20b: MXFP4 experts, and its plain twin inside (see tiny_quantized.py)."""
    from tests import tiny_quantized

    settings = {"chat_template": HARMONY_CHAT, "tokenizer_class": "PreTrainedTokenizerFast"}
    config = tiny.LLAMA_SHAPE | {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "experts_per_token": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "initial_context_length": 128,
        "initializer_range": 0.02,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "max_position_embeddings": 4096,
        "model_type": "gpt_oss",
        "num_experts_per_tok": 2,
        "num_hidden_layers": 4,
        "num_local_experts": 4,
        "output_router_logits": False,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 128,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 24,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    with tempfile.TemporaryDirectory(prefix="beheld-tiny-") as folder:
        source = Path(folder)
        ids = text.write_qwen_tokenizer(source, HARMONY_SPECIALS, "<|return|>", settings)
        config |= {"eos_token_id": ids["<|return|>"], "pad_token_id": ids["<|endoftext|>"]}
        generation = {
            "bos_token_id": ids["<|startoftext|>"],
            "do_sample": True,
            "eos_token_id": [ids["<|return|>"], ids["<|endoftext|>"], ids["<|call|>"]],
            "pad_token_id": ids["<|endoftext|>"],
        }
        tiny._write_model(source, config, generation, ids, seed=SEEDS["gpt_oss"], keep=("<|return|>",), adjust=_loud)
        for file in ("vocab.json", "merges.txt"):
            (source / file).unlink()
        tiny_quantized.quantize_mxfp4(source, path)


def _loud(model: Any) -> None:
    """Spread the sinks, so that they matter as much as what the heads see."""
    for layer in model.model.layers:
        layer.self_attn.sinks.mul_(4.0)


TINY: dict[str, Callable[[Path], None]] = {"gpt_oss": make_gpt_oss}
IMAGE_FAMILIES: tuple[str, ...] = ()
VIDEO_FAMILIES: tuple[str, ...] = ()
TEXT_FAMILIES = tuple(TINY)
FORMS.update({"gpt_oss": HARMONY_TURN})
