"""A small random checkpoint of Bee; see tiny.py for what such checkpoints have in common."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import tiny
from tests import tiny_text as text
from tests.tiny_media import FORMS, MARKERS
from tests.tiny_more import CHATML_TURN, chat
from tests.tiny_own_clip import write_model

SEEDS: dict[str, int] = {"bee": 2}
"""Family -> the seed of its weights; chosen so that greedy choices are clear (see oracle/test_tiny.py)."""

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<think>", "</think>")
PINPOINTS = [[42 * rows, 42 * columns] for rows in range(1, 5) for columns in range(1, 5)]


def make_bee(path: Path) -> None:
    """As Open-Bee/Bee-8B-RL: SigLIP and Qwen3, tiles for every image."""
    form = chat("<|im_start|>%role%\\n", "<|im_end|>\\n", "<image>\\n", "<video>\\n")
    form += "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
    ids = text.write_qwen_tokenizer(path, SPECIALS, "<|im_end|>", {"processor_class": "BeeProcessor"})
    (path / "chat_template.jinja").write_text(form, encoding="utf-8")
    config = {
        "architectures": ["BeeForConditionalGeneration"],
        "auto_map": {
            "AutoConfig": "configuration_bee.BeeConfig",
            "AutoModelForCausalLM": "modeling_bee.BeeForConditionalGeneration",
        },
        "dtype": "bfloat16",
        "image_grid_pinpoints": PINPOINTS,
        "image_token_index": ids["<image>"],
        "model_type": "bee",
        "multimodal_projector_bias": True,
        "projector_hidden_act": "gelu",
        "text_config": {
            "architectures": ["Qwen3ForCausalLM"],
            "attention_bias": False,
            "bos_token_id": ids["<|endoftext|>"],
            "eos_token_id": ids["<|im_end|>"],
            "head_dim": 32,
            "hidden_act": "silu",
            "hidden_size": 128,
            "intermediate_size": 96,
            "max_position_embeddings": 4096,
            "model_type": "qwen3",
            "num_attention_heads": 4,
            "num_hidden_layers": 3,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-6,
            "rope_scaling": None,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "use_sliding_window": False,
            "vocab_size": tiny.VOCAB,
        },
        "tie_word_embeddings": False,
        "use_image_newline_parameter": True,
        "vision_aspect_ratio": "anyres_max_9",
        "vision_config": {
            "hidden_size": 64,
            "image_size": 42,
            "intermediate_size": 96,
            "model_type": "siglip_vision_model",
            "num_attention_heads": 2,
            "num_hidden_layers": 3,
            "patch_size": 14,
            "vision_use_head": False,
        },
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "full",
    }
    generation = {"bos_token_id": ids["<|endoftext|>"], "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]]}
    quiet = tuple(token for token in SPECIALS if token != "<|im_end|>")
    write_model(path, config, generation, ids, quiet, seed=SEEDS["bee"], publish=_publish)
    pixels = {
        "auto_map": {"AutoProcessor": "processing_bee.BeeProcessor"},
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_pad": True,
        "do_rescale": True,
        "do_resize": True,
        "image_grid_pinpoints": PINPOINTS,
        "image_mean": tiny.HALF,
        "image_processor_type": "LlavaOnevisionImageProcessor",
        "image_std": tiny.HALF,
        "processor_class": "BeeProcessor",
        "resample": 3,
        "rescale_factor": 1 / 255,
        "size": {"height": 42, "width": 42},
    }
    text.write_json(path / "preprocessor_config.json", pixels)
    settings = {
        "image_token": "<image>",
        "num_image_tokens": 9,
        "processor_class": "BeeProcessor",
        "vision_aspect_ratio": "anyres_max_9",
        "vision_feature_select_strategy": "full",
    }
    text.write_json(path / "processor_config.json", settings)


def _publish(weights: dict[str, Any]) -> dict[str, Any]:
    """Weights under their published names: the tower's with its class's own prefix."""
    prefix = "model.vision_tower."
    return {re.sub(f"^{prefix}", f"{prefix}vision_model.", name): weight for name, weight in weights.items()}


TINY: dict[str, Callable[[Path], None]] = {"bee": make_bee}
IMAGE_FAMILIES = tuple(TINY)
FORMS.update({"bee": CHATML_TURN})
MARKERS.update({"bee": ("<image>\n", "")})
