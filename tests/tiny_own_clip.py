"""Small random checkpoints of families with OpenAI's CLIP tower and classes of their own.

Each is laid out as the checkpoint that its function names; see tiny.py for what they have in common.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import tiny
from tests import tiny_text as text
from tests.tiny_media import FORMS, MARKERS

SEEDS: dict[str, int] = {"phi3_v": 3, "molmo": 1}
"""Family -> the seed of its weights; chosen so that greedy choices are clear (see oracle/test_tiny.py)."""

CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}


def write_model(
    path: Path,
    config: dict[str, Any],
    generation: dict[str, Any],
    ids: dict[str, int],
    quiet: tuple[str, ...],
    *,
    seed: int,
    publish: Callable[[dict[str, Any]], dict[str, Any]] = dict,
) -> None:
    """config.json and random weights under published names; the tokens `quiet` hardly ever win."""
    import torch
    from safetensors.torch import save_file

    from beheld.families import registry

    config = tiny._reshape.get()(config)
    package = registry.find(config["model_type"], config.get("architectures", ()))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model_class = registry.own_class(package, "model")
        # transformers completes nested entries in place.
        own = registry.own_class(package, "config").from_dict(copy.deepcopy(config))
        model = model_class._from_config(own, dtype=torch.float32)
        tiny._fill(model)
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        head[[*(ids[token] for token in quiet), *range(len(ids), len(head))]] *= 0.05
    weights = {name: weight.detach().to(torch.bfloat16) for name, weight in model.state_dict().items()}
    made = {name: weight.contiguous() for name, weight in publish(weights).items()}
    save_file(made, path / "model.safetensors", metadata={"format": "pt"})
    text.write_json(path / "config.json", config)
    text.write_json(path / "generation_config.json", generation)


# --- Phi-3-vision ----------------------------------------------------------------------------------------------------

PHI3_CHAT = """{% for message in messages %}{{ '<|' + message['role'] + '|>' + '\n' + message['content'] + '<|end|>\n' \
}}{% endfor %}{% if add_generation_prompt and messages[-1]['role'] != 'assistant' %}{{- '<|assistant|>\n' -}}\
{% endif %}"""


def make_phi3_v(path: Path) -> None:
    """As microsoft/Phi-3.5-vision-instruct: numbered images, lines of patches with separators."""
    marks = ("<|endoftext|>", "<|assistant|>", "<|system|>", "<|end|>", "<|user|>", "<|image|>")
    settings = {"chat_template": PHI3_CHAT, "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    ids = text.write_llama_tokenizer(path, marks, settings)
    shape = {key: value for key, value in tiny.LLAMA_SHAPE.items() if key != "head_dim"}
    heads = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = (
        shape
        | heads
        | {
            "architectures": ["Phi3VForCausalLM"],
            "attention_dropout": 0.0,
            "auto_map": {
                "AutoConfig": "configuration_phi3_v.Phi3VConfig",
                "AutoModelForCausalLM": "modeling_phi3_v.Phi3VForCausalLM",
            },
            "bos_token_id": ids["<s>"],
            "embd_layer": {
                "embedding_cls": "image",
                "hd_transform_order": "sub_glb",
                "projection_cls": "mlp",
                "use_hd_transform": True,
                "with_learnable_separator": True,
            },
            "embd_pdrop": 0.0,
            "eos_token_id": ids["</s>"],
            "hidden_act": "silu",
            # The published code has these sizes and this id as constants.
            "image_token_id": ids["<|image|>"],
            "vision_config": {
                "hidden_size": 32,
                "image_size": 56,
                "intermediate_size": 64,
                "num_attention_heads": 2,
                "num_hidden_layers": 3,
            },
            "img_processor": {
                "image_dim_out": 32,
                "model_name": "openai/clip-vit-large-patch14-336",
                "name": "clip_vision_model",
                "num_img_tokens": 4,
            },
            "max_position_embeddings": 4800,
            "model_type": "phi3_v",
            "original_max_position_embeddings": 1200,
            "pad_token_id": ids["<|endoftext|>"],
            "resid_pdrop": 0.0,
            "rms_norm_eps": 1e-5,
            "rope_scaling": {
                "long_factor": [1.0 + 0.5 * n for n in range(16)],
                "short_factor": [1.0 + 0.05 * n for n in range(16)],
                "type": "su",
            },
            "rope_theta": 10000.0,
            "sliding_window": 262144,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "use_cache": True,
        }
    )
    generation = {
        "bos_token_id": ids["<s>"],
        "eos_token_id": [ids["<|end|>"], ids["<|endoftext|>"]],
        "pad_token_id": ids["<|endoftext|>"],
    }
    quiet = ("<unk>", "<s>", "</s>", *(mark for mark in marks if mark != "<|end|>"))
    write_model(path, config, generation, ids, quiet, seed=SEEDS["phi3_v"])
    pixels = {
        "auto_map": {
            "AutoImageProcessor": "image_processing_phi3_v.Phi3VImageProcessor",
            "AutoProcessor": "processing_phi3_v.Phi3VProcessor",
        },
        "image_processor_type": "Phi3VImageProcessor",
        "num_crops": 4,
        "num_img_tokens": 4,
        "processor_class": "Phi3VProcessor",
    }
    text.write_json(path / "preprocessor_config.json", pixels | CLIP)


# --- Molmo -----------------------------------------------------------------------------------------------------------

MOLMO_CHAT = """{% for message in messages -%}
{%- if (message['role'] == 'user') != (loop.index % 2 == 1) -%}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{%- endif -%}
{{ message['role'].capitalize() + ': ' + message['content'] }}{%- if not loop.last -%}{{ ' ' }}{%- endif %}
{%- endfor -%}{%- if add_generation_prompt -%}{{ ' Assistant:' }}{%- endif %}"""
MOLMO_MARKS = ("<im_start>", "<im_end>", "<im_patch>", "<im_col>", "<|image|>")


def make_molmo(path: Path) -> None:
    """As allenai/Molmo-7B-D-0924: fused projections, two tables of embeddings, crops that overlap."""
    specials = (*text.QWEN_SPECIALS[:3], *MOLMO_MARKS)
    settings = {"chat_template": MOLMO_CHAT, "processor_class": "MolmoProcessor"}
    ids = text.write_qwen_tokenizer(path, specials, "<|endoftext|>", settings)
    rows = ids["<im_start>"]
    config = {
        "architectures": ["MolmoForCausalLM"],
        "attention_layer_norm": False,
        "auto_map": {
            "AutoConfig": "config_molmo.MolmoConfig",
            "AutoModelForCausalLM": "modeling_molmo.MolmoForCausalLM",
        },
        "clip_qkv": None,
        "embedding_size": rows,
        "hidden_size": 128,
        "initializer_range": 0.02,
        "intermediate_size": 192,
        "layer_norm_eps": 1e-6,
        "layer_norm_type": "rms",
        "max_position_embeddings": 4096,
        "model_type": "molmo",
        "norm_after": False,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "qkv_bias": True,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "use_cache": True,
        "use_position_ids": True,
        # The published code has these sizes as constants.
        "vision_config": {
            "hidden_size": 32,
            "image_size": 84,
            "intermediate_size": 64,
            "num_attention_heads": 2,
            "num_hidden_layers": 10,
        },
        "vocab_size": rows,
        "weight_tying": False,
    }
    quiet = tuple(mark for mark in specials[:3] if mark != "<|endoftext|>")
    generation = {"_from_model_config": True, "transformers_version": "4.43.3"}
    write_model(path, config, generation, ids, quiet, seed=SEEDS["molmo"], publish=_publish_molmo)
    pixels = {
        "auto_map": {
            "AutoImageProcessor": "image_preprocessing_molmo.MolmoImageProcessor",
            "AutoProcessor": "preprocessing_molmo.MolmoProcessor",
        },
        "base_image_input_size": [84, 84],
        "do_normalize": True,
        "image_padding_mask": True,
        "image_patch_size": 14,
        "image_processor_type": "MolmoImageProcessor",
        "image_token_length_h": 3,
        "image_token_length_w": 3,
        "max_crops": 3,
        "overlap_margins": [2, 2],
        "processor_class": "MolmoProcessor",
    }
    text.write_json(path / "preprocessor_config.json", pixels | CLIP)


_MOLMO_NAMES = (
    (r"^lm_head\.", "model.transformer.ff_out."),
    (r"^model\.norm\.", "model.transformer.ln_f."),
    (r"^model\.layers\.(.*)\.input_layernorm\.", r"model.layers.\1.attn_norm."),
    (r"\.post_attention_layernorm\.", ".ff_norm."),
    (r"\.self_attn\.o_proj\.", ".attn_out."),
    (r"\.mlp\.down_proj\.", ".ff_out."),
    (r"^model\.layers\.", "model.transformer.blocks."),
    (r"image_vit\.layers\.", "image_vit.transformer.resblocks."),
    (r"(image_vit.*)\.self_attn\.([qkv])_proj\.", r"\1.attention.w\2."),
    (r"\.self_attn\.out_proj\.", ".attention.wo."),
    (r"\.mlp\.fc([12])\.", r".feed_forward.w\1."),
    (r"\.layer_norm1\.", ".attention_norm."),
    (r"\.layer_norm2\.", ".ffn_norm."),
)


def _publish_molmo(weights: dict[str, Any]) -> dict[str, Any]:
    """Weights under their published names, with the fused matrices."""
    import torch

    made: dict[str, Any] = {}
    for name, weight in weights.items():
        new = name
        for pattern, published in _MOLMO_NAMES:
            new = re.sub(pattern, published, new)
        made[new] = weight
    table = made.pop("model.embed_tokens.weight")
    made["model.transformer.wte.embedding"], made["model.transformer.wte.new_embedding"] = table[:-128], table[-128:]
    fused = {
        "self_attn.q_proj": ("att_proj", ("q_proj", "k_proj", "v_proj")),
        "mlp.up_proj": ("ff_proj", ("up_proj", "gate_proj")),
    }
    for first, (whole, parts) in fused.items():
        for name in [name for name in made if first in name]:
            last = first.split(".")[1]
            made[name.replace(first, whole)] = torch.cat([made.pop(name.replace(last, part)) for part in parts])
    return made


TINY: dict[str, Callable[[Path], None]] = {"phi3_v": make_phi3_v, "molmo": make_molmo}
IMAGE_FAMILIES = ("phi3_v", "molmo")
FORMS["phi3_v"] = "<|user|>\n{}<|end|>\n<|assistant|>\n"
FORMS["molmo"] = "User: {} Assistant:"
# Wherever they stand in a conversation, its images are read before its text.
MARKERS["molmo"] = ("", "")
MARKERS["phi3_v"] = ("<|image|>\n", "")
# Their templates take strings, and leave it to the caller to mark images.
CHATLESS_FAMILIES = IMAGE_FAMILIES
