"""Real shapes for GPU benchmarks: configuration, tokenizer and processor, without weights (`load_format="dummy"`).

Sizes are those of the public checkpoints; tokenizers are the tests' small ones, spelled out to the size of the model's
vocabulary.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import TEXT, VISION

_QWEN_3B = {
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
_QWEN_7B = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
_QWEN_32B = {
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "num_attention_heads": 40,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}
# Qwen3-VL-30B-A3B: 128 experts, of which a token takes 8.
_QWEN3_30B_MOE = {
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 32768,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
    "vocab_size": 151936,
}
_QWEN3_TOWER = {
    "deepstack_visual_indexes": [8, 16, 24],
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "num_position_embeddings": 2304,
    "out_hidden_size": 2048,
    "patch_size": 16,
}
# GLM-4.5V. A token takes 8 of 128 experts.
_GLM = {
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "max_position_embeddings": 32768,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 128,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 46,
    "num_key_value_heads": 8,
    "rope_scaling": {"mrope_section": [8, 12, 12], "rope_type": "default"},
    "vocab_size": 151552,
}
_GLM_TOWER = {
    "depth": 24,
    "hidden_size": 1536,
    "image_size": 336,
    "intermediate_size": 10944,
    "num_heads": 12,
    "out_hidden_size": 4096,
}
_LLAMA_7B = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32064,
    "max_position_embeddings": 4096,
}
# Qwen3.5-4B: the gated delta rule in three of four layers.
_QWEN35_4B = {
    "head_dim": 256,
    "hidden_size": 2560,
    "intermediate_size": 9216,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 32768,
    "num_attention_heads": 16,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000.0,
        "rope_type": "default",
    },
    "tie_word_embeddings": True,
    "vocab_size": 248320,
}
_QWEN35_TOWER = {
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_heads": 16,
    "num_position_embeddings": 2304,
    "out_hidden_size": 2560,
    "patch_size": 16,
}
_THREE_OF_FOUR = (["linear_attention"] * 3 + ["full_attention"]) * 8
# GLM-4.7-Flash's layers, 16 of its 47: latent attention; 64 experts, of which a token takes 4, and a shared one.
_GLM_FLASH_16_OF_47 = {
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "kv_lora_rank": 512,
    "max_position_embeddings": 65536,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_attention_heads": 20,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 16,
    "num_key_value_heads": 20,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "torch_dtype": "bfloat16",
    "v_head_dim": 256,
    "vocab_size": 154880,
}
# Whisper-large-v3, whose windows take 30 s and whose answers 448 tokens.
_WHISPER_LARGE = {
    "d_model": 1280,
    "decoder_attention_heads": 20,
    "decoder_ffn_dim": 5120,
    "decoder_layers": 32,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "encoder_layers": 32,
    "max_source_positions": 1500,
    "max_target_positions": 448,
    "num_hidden_layers": 32,
    "num_mel_bins": 128,
    "torch_dtype": "bfloat16",
    "vocab_size": 51866,
}
_QWEN_TOWER = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "fullatt_block_indexes": [7, 15, 23, 31],
    "window_size": 112,
}
_CLIP = {
    "hidden_size": 1024,
    "image_size": 336,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "projection_dim": 768,
}
_SIGLIP = {
    "hidden_size": 1152,
    "image_size": 384,
    "intermediate_size": 4304,
    "num_attention_heads": 16,
    "num_hidden_layers": 26,
}
_NINE = [[384 * i, 384 * j] for i in range(1, 7) for j in range(1, 7)]


@dataclass(frozen=True)
class Shape:
    """A checkpoint to be made.

    Attributes:
        source: the tests' checkpoint whose files it takes.
        edits: configuration file -> what to change in it, nested.
        before, each, after: a prompt's text before its pictures, for each picture, and after them.
    """

    source: str
    edits: dict[str, dict[str, Any]]
    before: str
    each: str
    after: str


def _qwen(text: dict[str, Any], tower: dict[str, Any] = _QWEN_TOWER) -> Shape:
    config = {
        **text,
        "vocab_size": 151936,
        "torch_dtype": "bfloat16",
        "max_position_embeddings": 32768,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "vision_config": {**tower, "out_hidden_size": text["hidden_size"]},
    }
    pixels = {"min_pixels": 3136, "max_pixels": 12845056}
    # Of each frame.
    frames = {"min_pixels": 100352, "max_pixels": 602112}
    return Shape(
        "qwen2_5_vl",
        {"config.json": config, "preprocessor_config.json": pixels, "video_preprocessor_config.json": frames},
        "<|im_start|>user\n",
        "<|vision_start|><|image_pad|><|vision_end|>",
        "What is the content of this image ?<|im_end|>\n<|im_start|>assistant\n",
    )


_PIXELS = {"longest_edge": 12845056, "shortest_edge": 3136}


def _qwen35(layer_types: list[str]) -> Shape:
    text = _QWEN35_4B | {"layer_types": layer_types}
    return Shape(
        "qwen3_5",
        {
            "config.json": {
                "text_config": text,
                "tie_word_embeddings": True,
                "torch_dtype": "bfloat16",
                "vision_config": _QWEN35_TOWER,
            },
            "preprocessor_config.json": {"patch_size": 16, "size": _PIXELS},
            "video_preprocessor_config.json": {"patch_size": 16, "size": _PIXELS},
        },
        "<|im_start|>user\n",
        "<|vision_start|><|image_pad|><|vision_end|>",
        "What is the content of this image ?<|im_end|>\n<|im_start|>assistant\n",
    )


def _glm(text: dict[str, Any]) -> Shape:
    return Shape(
        "glm4v_moe",
        {
            "config.json": {"text_config": text, "vision_config": _GLM_TOWER, "torch_dtype": "bfloat16"},
            "preprocessor_config.json": {"size": _PIXELS},
            "video_preprocessor_config.json": {"size": _PIXELS},
        },
        "[gMASK]<sop><|user|>\n",
        "<|begin_of_image|><|image|><|end_of_image|>",
        "What is the content of this image ?<|assistant|>\n",
    )


def _qwen3_moe(text: dict[str, Any]) -> Shape:
    return Shape(
        "qwen3_vl_moe",
        {
            "config.json": {"text_config": text, "vision_config": _QWEN3_TOWER, "torch_dtype": "bfloat16"},
            "preprocessor_config.json": {"patch_size": 16, "size": _PIXELS},
            "video_preprocessor_config.json": {"patch_size": 16, "size": _PIXELS},
        },
        "<|im_start|>user\n",
        "<|vision_start|><|image_pad|><|vision_end|>",
        "What is the content of this image ?<|im_end|>\n<|im_start|>assistant\n",
    )


SHAPES = {
    # To try the benchmarks themselves.
    "tiny": Shape(
        "qwen3_vl_moe",
        {},
        "<|im_start|>user\n",
        "<|vision_start|><|image_pad|><|vision_end|>",
        "What is the content of this image ?<|im_end|>\n<|im_start|>assistant\n",
    ),
    # For a CPU.
    "0.4B": _qwen({**TEXT, "num_attention_heads": 8, "num_key_value_heads": 2, "tie_word_embeddings": False}, VISION),
    "3B": _qwen(_QWEN_3B),
    "7B": _qwen(_QWEN_7B),
    "32B": _qwen(_QWEN_32B),
    "30B-A3B": _qwen3_moe(_QWEN3_30B_MOE),
    # Some of its layers, so that several engines share a GPU while they start.
    "30B-A3B-12": _qwen3_moe(_QWEN3_30B_MOE | {"num_hidden_layers": 12}),
    # Its weights take 200 GiB.
    "GLM": _glm(_GLM),
    "GLM-12": _glm(_GLM | {"num_hidden_layers": 12}),
    "Qwen3.5-4B": _qwen35(_THREE_OF_FOUR),
    # What prompts of Qwen3.5-4B are measured against: the same with attention in all layers.
    "Qwen3.5-4B-attention": _qwen35(["full_attention"] * 32),
    "GLM-Flash-16": Shape("glm4_moe_lite", {"config.json": _GLM_FLASH_16_OF_47}, "", "", "What is this ?"),
    "whisper-large": Shape(
        "whisper",
        {
            "config.json": _WHISPER_LARGE,
            "preprocessor_config.json": {
                "chunk_length": 30,
                "feature_size": 128,
                "n_samples": 480000,
                "nb_max_frames": 3000,
            },
        },
        "",
        "",
        "",
    ),
    "llava": Shape(
        "llava",
        {
            "config.json": {
                "text_config": _LLAMA_7B,
                "vision_config": _CLIP,
                "image_seq_length": 576,
                "torch_dtype": "bfloat16",
            },
            "preprocessor_config.json": {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}},
        },
        "USER: ",
        "<image>\n",
        "What is this? ASSISTANT:",
    ),
    "onevision": Shape(
        "llava_onevision",
        {
            "config.json": {
                "text_config": {**_QWEN_7B, "vocab_size": 152000, "max_position_embeddings": 32768},
                "vision_config": _SIGLIP,
                "tie_word_embeddings": False,
                "image_grid_pinpoints": _NINE,
            },
            "preprocessor_config.json": {"size": {"height": 384, "width": 384}, "image_grid_pinpoints": _NINE},
            "processor_config.json": {"num_image_tokens": 729},
        },
        "<|im_start|>user\n",
        "<image>\n",
        "What is this?<|im_end|>\n<|im_start|>assistant\n",
    ),
}


def checkpoint(name: str, folder: Path) -> Path:
    """Make the checkpoint of that shape in `folder`; returns its path. Several processes may do so at once."""
    from tests import tiny

    shape = SHAPES[name]
    path = folder / name
    path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as made:
        making = Path(made)
        for file in tiny.checkpoint(shape.source).iterdir():
            if ".safetensors" not in file.name:
                shutil.copy(file, making / file.name)
        for file_name, edits in shape.edits.items():
            config = json.loads((making / file_name).read_text(encoding="utf-8"))
            (making / file_name).write_text(json.dumps(_edited(config, edits)), encoding="utf-8")
        _spell_out(making)
        for file in making.iterdir():
            file.replace(path / file.name)
    return path


def _spell_out(path: Path) -> None:
    """Give every id of the model a text of its own in the tokenizer: turning tokens into text costs what it costs a
    user. Nothing is tokenized differently, for no merges lead there.
    """
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    size = config.get("vocab_size") or config["text_config"]["vocab_size"]
    file = path / "tokenizer.json"
    made = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = made["model"]["vocab"]
    # Added tokens that are no entries would be numbered behind the last entry.
    vocabulary |= {token["content"]: token["id"] for token in made["added_tokens"]}
    used = set(vocabulary.values())
    space = "Ġ" if made["decoder"]["type"] == "ByteLevel" else "▁"
    vocabulary |= {f"{space}{_letters(token_id)}": token_id for token_id in range(size) if token_id not in used}
    file.write_text(json.dumps(made), encoding="utf-8")


def _letters(number: int) -> str:
    """A word of its own for each number: digits of base 26, behind letters that begin no other token."""
    word = ""
    while number:
        number, digit = divmod(number, 26)
        word = chr(ord("a") + digit) + word
    return "zq" + word


def _edited(config: dict[str, Any], edits: dict[str, Any]) -> dict[str, Any]:
    made = dict(config)
    for key, value in edits.items():
        nested = isinstance(value, dict) and isinstance(made.get(key), dict) and key.endswith("_config")
        made[key] = _edited(made[key], value) if nested else value
    return made


def prompt(name: str, num_pictures: int) -> str:
    """A question about that many pictures."""
    shape = SHAPES[name]
    return shape.before + shape.each * num_pictures + shape.after
