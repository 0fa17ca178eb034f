"""Small random checkpoints of families with OpenAI's CLIP tower and classes of their own.

Each is laid out as the checkpoint that its function names; see tiny.py for what they have in common.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import tiny
from tests import tiny_text as text
from tests.tiny_media import FORMS, MARKERS

SEEDS: dict[str, int] = {"phi3_v": 3}
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
    package = registry.find(config["model_type"], config["architectures"])
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model_class = registry.own_class(package, "model")
        # transformers completes nested entries in place.
        own = registry.own_class(package, "config").from_dict(copy.deepcopy(config))
        model = model_class._from_config(own, dtype=torch.float32)
        tiny._fill(model)
    with torch.no_grad():
        silent = [*(ids[token] for token in quiet), *range(len(ids), tiny.VOCAB)]
        model.get_output_embeddings().weight[silent] *= 0.05
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
    config = shape | heads | {
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


TINY: dict[str, Callable[[Path], None]] = {"phi3_v": make_phi3_v}
IMAGE_FAMILIES = ("phi3_v",)
FORMS["phi3_v"] = "<|user|>\n{}<|end|>\n<|assistant|>\n"
MARKERS["phi3_v"] = ("<|image|>\n", "")
# Their templates take strings, and leave it to the caller to mark images.
CHATLESS_FAMILIES = IMAGE_FAMILIES
