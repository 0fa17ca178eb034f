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
from tests.tiny_peculiar import byte_tokens

SEEDS: dict[str, int] = {"deepseek_v2": 3, "deepseek_v3": 2, "glm4_moe_lite": 2, "gpt_oss": 2}
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


MLA_SHAPE = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "kv_lora_rank": 32,
    "moe_intermediate_size": 32,
    "moe_layer_freq": 1,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 4,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "v_head_dim": 12,
}
"""Latents of 32 numbers and rotary keys of 8: prompts of more than 18 tokens are computed expanded, others absorbed."""
DEEPSEEK_CHAT = (
    "{{- bos_token -}}{%- for message in messages -%}"
    "{%- if message.role == 'user' -%}{{- 'User: ' + message.content + '\n\n' -}}"
    "{%- else -%}{{- 'Assistant: ' + message.content + eos_token -}}{%- endif -%}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{- 'Assistant:' -}}{%- endif -%}"
)
DEEPSEEK_SPECIALS = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>")


def _deepseek_tokens(path: Path) -> dict[str, int]:
    first, last, pad = DEEPSEEK_SPECIALS
    settings = {
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": first,
        "chat_template": DEEPSEEK_CHAT,
        "clean_up_tokenization_spaces": False,
        "eos_token": last,
        "legacy": True,
        "model_max_length": 16384,
        "pad_token": pad,
        "tokenizer_class": "LlamaTokenizerFast",
        "unk_token": None,
    }
    return byte_tokens(path, DEEPSEEK_SPECIALS, (), first, settings)


def make_deepseek_v2(path: Path) -> None:
    """As deepseek-ai/DeepSeek-V2-Lite-Chat: queries without a latent of their own, rotary pairs side by side."""
    ids = _deepseek_tokens(path)
    first, last, _ = DEEPSEEK_SPECIALS
    scaling = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707}
    config = (
        tiny.LLAMA_SHAPE
        | MLA_SHAPE
        | {
            "architectures": ["DeepseekV2ForCausalLM"],
            "aux_loss_alpha": 0.001,
            "bos_token_id": ids[first],
            "eos_token_id": ids[last],
            "max_position_embeddings": 4096,
            "model_type": "deepseek_v2",
            "n_group": 1,
            "n_routed_experts": 4,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "q_lora_rank": None,
            "rope_scaling": scaling | {"original_max_position_embeddings": 102, "type": "yarn"},
            "rope_theta": 10000,
            "routed_scaling_factor": 1.0,
            "scoring_func": "softmax",
            "seq_aux": True,
            "topk_group": 1,
            "topk_method": "greedy",
        }
    )
    generation = {"bos_token_id": ids[first], "eos_token_id": ids[last]}
    tiny._write_model(path, config, generation, ids, seed=SEEDS["deepseek_v2"], keep=(last,))


def make_deepseek_v3(path: Path) -> None:
    """As deepseek-ai/DeepSeek-V3 in BF16: latents of queries, experts in groups, rotary pairs put apart at each use."""
    ids = _deepseek_tokens(path)
    first, last, _ = DEEPSEEK_SPECIALS
    scaling = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}
    config = (
        tiny.LLAMA_SHAPE
        | MLA_SHAPE
        | {
            "architectures": ["DeepseekV3ForCausalLM"],
            "aux_loss_alpha": 0.001,
            "bos_token_id": ids[first],
            "eos_token_id": ids[last],
            "ep_size": 1,
            "max_position_embeddings": 4096,
            "model_type": "deepseek_v3",
            "n_group": 2,
            "n_routed_experts": 6,
            "norm_topk_prob": True,
            "num_nextn_predict_layers": 1,
            "q_lora_rank": 24,
            "rope_scaling": scaling | {"original_max_position_embeddings": 102, "type": "yarn"},
            "rope_theta": 10000,
            "routed_scaling_factor": 2.5,
            "scoring_func": "sigmoid",
            "topk_group": 1,
            "topk_method": "noaux_tc",
        }
    )
    generation = {"bos_token_id": ids[first], "do_sample": True, "eos_token_id": ids[last], "temperature": 0.6}
    seed = SEEDS["deepseek_v3"]
    tiny._write_model(path, config, generation, ids, seed=seed, keep=(last,), adjust=_uneven_experts)


GLM_SPECIALS = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
GLM_TURN = "[gMASK]<sop><|user|>{}<|assistant|>"
GLM_CHAT = (
    "[gMASK]<sop>{%- for message in messages -%}{{- '<|' + message.role + '|>' + message.content -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def make_glm4_moe_lite(path: Path) -> None:
    """As zai-org/GLM-4.7-Flash: values larger than the keys' part without positions, five heads."""
    settings = {"chat_template": GLM_CHAT, "tokenizer_class": "PreTrainedTokenizerFast"}
    ids = text.write_qwen_tokenizer(path, GLM_SPECIALS, "<|endoftext|>", settings)
    for file in ("vocab.json", "merges.txt"):
        (path / file).unlink()
    ends = [ids["<|endoftext|>"], ids["<|user|>"], ids["<|observation|>"]]
    config = (
        tiny.LLAMA_SHAPE
        | MLA_SHAPE
        | {
            "architectures": ["Glm4MoeLiteForCausalLM"],
            "eos_token_id": ends,
            "max_position_embeddings": 4096,
            "model_type": "glm4_moe_lite",
            "n_group": 1,
            "n_routed_experts": 4,
            "norm_topk_prob": True,
            "num_attention_heads": 5,
            "num_key_value_heads": 5,
            "num_nextn_predict_layers": 1,
            "pad_token_id": ids["<|endoftext|>"],
            "partial_rotary_factor": 1.0,
            "q_lora_rank": 24,
            "rms_norm_eps": 1e-05,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "routed_scaling_factor": 1.8,
            "topk_group": 1,
            "topk_method": "noaux_tc",
            "v_head_dim": 24,
        }
    )
    generation = {"eos_token_id": ends, "pad_token_id": ids["<|endoftext|>"], "temperature": 1.0}
    seed, last = SEEDS["glm4_moe_lite"], "<|endoftext|>"
    tiny._write_model(path, config, generation, ids, seed=seed, keep=(last,), adjust=_uneven_experts)


def _uneven_experts(model: Any) -> None:
    """Spread what is added to the scores by which experts are chosen, but not weighed."""
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            # The sine of any numbers: nothing random is drawn outside of the seed.
            buffer.copy_(0.3 * (7.0 * buffer.new_ones(buffer.shape).cumsum(0)).sin())


def _loud(model: Any) -> None:
    """Spread the sinks, so that they matter as much as what the heads see."""
    for layer in model.model.layers:
        layer.self_attn.sinks.mul_(4.0)


TINY: dict[str, Callable[[Path], None]] = {
    "deepseek_v2": make_deepseek_v2,
    "deepseek_v3": make_deepseek_v3,
    "glm4_moe_lite": make_glm4_moe_lite,
    "gpt_oss": make_gpt_oss,
}
IMAGE_FAMILIES: tuple[str, ...] = ()
VIDEO_FAMILIES: tuple[str, ...] = ()
TEXT_FAMILIES = tuple(TINY)
FORMS.update(
    {
        "deepseek_v2": "User: {}\n\nAssistant:",
        "deepseek_v3": "User: {}\n\nAssistant:",
        "glm4_moe_lite": GLM_TURN,
        "gpt_oss": HARMONY_TURN,
    }
)
