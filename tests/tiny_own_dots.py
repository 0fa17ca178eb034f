"""A small random checkpoint of dots.ocr; see tiny.py for what such checkpoints have in common."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests import tiny_text as text
from tests.tiny_media import FORMS, MARKERS
from tests.tiny_own_clip import CLIP, write_model

SEEDS: dict[str, int] = {"dots_ocr": 1}
MARKS = (
    "<|imgpad|>",
    "<|img|>",
    "<|endofimg|>",
    "<|system|>",
    "<|endofsystem|>",
    "<|user|>",
    "<|endofuser|>",
    "<|assistant|>",
    "<|endofassistant|>",
)
CHAT = """{%- for message in messages -%}{{ '<|' + message.role + '|>' }}{%- if message.content is string -%}\
{{ message.content }}{%- else -%}{%- for part in message.content -%}{%- if part.type == 'image' -%}\
{{ '<|img|><|imgpad|><|endofimg|>' }}{%- else -%}{{ part.text }}{%- endif -%}{%- endfor -%}{%- endif -%}\
{{ '<|endof' + message.role + '|>' }}{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"""


def make_dots_ocr(path: Path) -> None:
    """As rednote-hilab/dots.ocr: Qwen2's flat configuration with a tower's, the tokenizer's files of Qwen2."""
    specials = (*text.QWEN_SPECIALS, *MARKS)
    ids = text.write_qwen_tokenizer(path, specials, "<|endoftext|>", {"chat_template": CHAT})
    config = {
        "architectures": ["DotsOCRForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "auto_map": {
            "AutoConfig": "configuration_dots.DotsOCRConfig",
            "AutoModelForCausalLM": "modeling_dots_ocr.DotsOCRForCausalLM",
        },
        "hidden_act": "silu",
        "hidden_size": 128,
        "image_token_id": ids["<|imgpad|>"],
        "initializer_range": 0.02,
        "intermediate_size": 192,
        "max_position_embeddings": 4096,
        "max_window_layers": 3,
        "model_type": "dots_ocr",
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "video_token_id": ids["<|video_pad|>"],
        "vision_config": {
            "attn_implementation": "flash_attention_2",
            "embed_dim": 64,
            "gradient_checkpointing": False,
            "hidden_size": 128,
            "init_merger_std": 0.02,
            "initializer_range": 0.02,
            "intermediate_size": 96,
            "is_causal": False,
            "num_attention_heads": 2,
            "num_channels": 3,
            "num_hidden_layers": 2,
            "patch_size": 14,
            "post_norm": True,
            "rms_norm_eps": 1e-5,
            "spatial_merge_size": 2,
            "temporal_patch_size": 1,
            "use_bias": False,
        },
        "vocab_size": -(-len(ids) // 16) * 16,
    }
    generation = {
        "eos_token_id": [ids["<|endoftext|>"], ids["<|endofassistant|>"]],
        "max_length": 32768,
        "pad_token_id": ids["<|endoftext|>"],
    }
    quiet = tuple(token for token in specials if token != "<|endofassistant|>")
    write_model(path, config, generation, ids, quiet, seed=SEEDS["dots_ocr"])
    pixels = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "max_pixels": 31360,
        "merge_size": 2,
        "min_pixels": 3136,
        "patch_size": 14,
        "processor_class": "DotsVLProcessor",
        "temporal_patch_size": 1,
    }
    text.write_json(path / "preprocessor_config.json", pixels | CLIP)
    text.write_json(path / "chat_template.json", {"chat_template": CHAT})


TINY: dict[str, Callable[[Path], None]] = {"dots_ocr": make_dots_ocr}
IMAGE_FAMILIES = ("dots_ocr",)
FORMS["dots_ocr"] = "<|user|>{}<|endofuser|><|assistant|>"
MARKERS["dots_ocr"] = ("<|img|><|imgpad|><|endofimg|>", "")
