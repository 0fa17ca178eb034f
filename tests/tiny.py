"""Small random checkpoints of every family, laid out on disk as the real ones are.

`checkpoint(name)` gives the folder of one; it is made at the first call and kept in the temporary folder under a key of
this file's content and the libraries' versions, so that later sessions and other test processes find it ready.

The weights are random but not degenerate: norms, biases and position tables differ from their neutral values, so that
an engine which forgets one of them gives other tokens, and logits are spread so wide that greedy choices are stable.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any

from filelock import FileLock

from tests import tiny_text as text
from tests.tiny_media import SIZES, SOUND_RATE, frames, markers, picture, pictures, prompt, sound, wav, wrap

__all__ = [
    "IMAGE_FAMILIES",
    "SIZES",
    "SOUND_FAMILIES",
    "SOUND_RATE",
    "TEXT_FAMILIES",
    "TINY",
    "VIDEO_FAMILIES",
    "checkpoint",
    "frames",
    "markers",
    "picture",
    "pictures",
    "prompt",
    "reshaped",
    "reshaping",
    "sound",
    "wav",
    "wrap",
]

_reshape: ContextVar[Callable[[dict[str, Any]], dict[str, Any]]] = ContextVar("reshape", default=lambda config: config)
"""What is done to every configuration before its weights are made; see `reshaped`."""
CLIP_MEAN = [0.48145466, 0.4578275, 0.40821073]
CLIP_STD = [0.26862954, 0.26130258, 0.27577711]
HALF = [0.5, 0.5, 0.5]
VOCAB = 512
LLAMA_SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
}
CLIP_SHAPE = {
    "hidden_size": 32,
    "image_size": 56,
    "intermediate_size": 64,
    "model_type": "clip_vision_model",
    "num_attention_heads": 2,
    "num_hidden_layers": 3,
    "patch_size": 14,
    "projection_dim": 32,
    "vocab_size": 64,
}


# --- families --------------------------------------------------------------------------------------------------------


def make_llava(path: Path) -> None:
    """CLIP and Llama, as llava-hf/llava-1.5-7b-hf: float16, in shards, chat template in JSON."""
    ids = text.write_llama_tokenizer(
        path, ("<image>", "<pad>"), _processor("LlavaProcessor") | {"padding_side": "left", "pad_token": "<pad>"}
    )
    config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "ignore_index": -100,
        "image_seq_length": 16,
        "image_token_index": ids["<image>"],
        "model_type": "llava",
        "pad_token_id": ids["<pad>"],
        "projector_hidden_act": "gelu",
        "text_config": LLAMA_SHAPE
        | {
            "architectures": ["LlamaForCausalLM"],
            "max_position_embeddings": 1024,
            "model_type": "llama",
            "rms_norm_eps": 1e-5,
            "torch_dtype": "float16",
        },
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "vision_config": CLIP_SHAPE,
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
    }
    text.write_json(path / "preprocessor_config.json", _clip_processor("CLIPImageProcessor", "LlavaProcessor"))
    text.write_json(path / "processor_config.json", _llava_processor("LlavaProcessor"))
    text.write_json(path / "chat_template.json", {"chat_template": text.LLAVA_CHAT})
    _write_model(path, config, _llama_generation(ids), ids, seed=101, shards="200KB")


def make_llava_next(path: Path) -> None:
    """CLIP and Mistral with tiles, as llava-hf/llava-v1.6-mistral-7b-hf: float16, chat template in JSON."""
    ids = text.write_llama_tokenizer(
        path, ("<image>", "<pad>"), _processor("LlavaNextProcessor") | {"padding_side": "left", "pad_token": "<pad>"}
    )
    pinpoints = [[56, 112], [112, 56], [112, 112], [168, 56], [56, 168]]
    config = {
        "architectures": ["LlavaNextForConditionalGeneration"],
        "ignore_index": -100,
        "image_grid_pinpoints": pinpoints,
        "image_token_index": ids["<image>"],
        "model_type": "llava_next",
        "pad_token_id": ids["<pad>"],
        "projector_hidden_act": "gelu",
        "text_config": LLAMA_SHAPE
        | {
            "architectures": ["MistralForCausalLM"],
            "max_position_embeddings": 4096,
            "model_type": "mistral",
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "torch_dtype": "float16",
        },
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "use_image_newline_parameter": True,
        "vision_config": CLIP_SHAPE,
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
    }
    preprocessor = _clip_processor("LlavaNextImageProcessor", "LlavaNextProcessor")
    preprocessor |= {"aspect_ratio_setting": "anyres", "image_grid_pinpoints": pinpoints, "do_pad": True}
    text.write_json(path / "preprocessor_config.json", preprocessor)
    text.write_json(path / "processor_config.json", _llava_processor("LlavaNextProcessor"))
    text.write_json(path / "chat_template.json", {"chat_template": text.LLAVA_NEXT_CHAT})
    _write_model(path, config, _llama_generation(ids), ids, seed=1402)


def make_llava_onevision(path: Path) -> None:
    """SigLIP and Qwen2 with tiles and videos, as llava-hf/llava-onevision-qwen2-0.5b-ov-hf: tied embeddings.

    A tile has 3 x 3 patches: odd as the real 27 x 27, since the pooling of video frames rounds up.
    """
    ids = text.write_qwen_tokenizer(
        path, text.ONEVISION_SPECIALS, "<|im_end|>", _processor("LlavaOnevisionProcessor") | {"padding_side": "left"}
    )
    pinpoints = [[42 * rows, 42 * columns] for rows in range(1, 5) for columns in range(1, 5)]
    config = {
        "architectures": ["LlavaOnevisionForConditionalGeneration"],
        "ignore_index": -100,
        "image_grid_pinpoints": pinpoints,
        "image_token_index": ids["<image>"],
        "model_type": "llava_onevision",
        "projector_hidden_act": "gelu",
        "text_config": LLAMA_SHAPE
        | {
            "architectures": ["Qwen2ForCausalLM"],
            "bos_token_id": ids["<|endoftext|>"],
            "eos_token_id": ids["<|im_end|>"],
            "max_position_embeddings": 4096,
            "max_window_layers": 3,
            "model_type": "qwen2",
            "rope_theta": 1000000.0,
            "sliding_window": 4096,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_sliding_window": False,
        },
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_image_newline_parameter": True,
        "video_token_index": ids["<video>"],
        "vision_aspect_ratio": "anyres_max_9",
        "vision_config": {
            "hidden_size": 32,
            "image_size": 42,
            "intermediate_size": 64,
            "model_type": "siglip_vision_model",
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
            "patch_size": 14,
            "vision_use_head": False,
        },
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    }
    pixels = {
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": HALF,
        "image_std": HALF,
        "processor_class": "LlavaOnevisionProcessor",
        "resample": 3,
        "rescale_factor": 1 / 255,
        "size": {"height": 42, "width": 42},
    }
    image = {"do_pad": True, "image_grid_pinpoints": pinpoints, "image_processor_type": "LlavaOnevisionImageProcessor"}
    text.write_json(path / "preprocessor_config.json", pixels | image)
    text.write_json(
        path / "video_preprocessor_config.json", pixels | {"video_processor_type": "LlavaOnevisionVideoProcessor"}
    )
    text.write_json(
        path / "processor_config.json",
        {
            "image_token": "<image>",
            "num_image_tokens": 9,
            "processor_class": "LlavaOnevisionProcessor",
            "video_token": "<video>",
            "vision_aspect_ratio": "anyres_max_9",
            "vision_feature_select_strategy": "full",
        },
    )
    text.write_json(path / "chat_template.json", {"chat_template": text.ONEVISION_CHAT})
    generation = {
        "bos_token_id": ids["<|endoftext|>"],
        "do_sample": True,
        "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]],
        "pad_token_id": ids["<|endoftext|>"],
        "top_k": 20,
    }
    _write_model(path, config, generation, ids, seed=1103, keep=("<|im_end|>",))


def make_qwen2_vl(path: Path) -> None:
    """As Qwen/Qwen2-VL-7B-Instruct: flat configuration, chat template in JSON, one file for pictures and videos."""
    ids = text.write_qwen_tokenizer(
        path, text.QWEN_SPECIALS, "<|im_end|>", {"chat_template": text.QWEN_VISION_CHAT, "padding_side": "left"}
    )
    vision = {
        "depth": 2,
        "embed_dim": 32,
        "hidden_size": 64,
        "in_channels": 3,
        "in_chans": 3,
        "mlp_ratio": 2,
        "num_heads": 2,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "temporal_patch_size": 2,
    }
    config = _qwen_vl_config("Qwen2VLForConditionalGeneration", "qwen2_vl", ids, vision) | {
        "tie_word_embeddings": False
    }
    text.write_json(path / "preprocessor_config.json", _qwen_vl_pixels("Qwen2VLProcessor"))
    text.write_json(path / "chat_template.json", {"chat_template": text.QWEN_VISION_CHAT})
    generation = _qwen_generation(ids) | {"temperature": 0.01, "top_k": 1, "top_p": 0.001}
    _write_model(path, config, generation, ids, seed=104, keep=("<|im_end|>",))


def make_qwen2_5_vl(path: Path) -> None:
    """As Qwen/Qwen2.5-VL-3B-Instruct: a tower with windows, tied embeddings, a repetition penalty by default."""
    ids = text.write_qwen_tokenizer(
        path, text.QWEN_SPECIALS, "<|im_end|>", {"chat_template": text.QWEN_VISION_CHAT, "padding_side": "left"}
    )
    vision = {
        "depth": 3,
        "fullatt_block_indexes": [1],
        "hidden_act": "silu",
        "hidden_size": 32,
        "in_channels": 3,
        "in_chans": 3,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": 64,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "temporal_patch_size": 2,
        "tokens_per_second": 2,
        "window_size": 56,
    }
    config = _qwen_vl_config("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", ids, vision)
    config["tie_word_embeddings"] = True
    text.write_json(path / "preprocessor_config.json", _qwen_vl_pixels("Qwen2_5_VLProcessor"))
    video = _qwen_vl_pixels("Qwen2_5_VLProcessor") | {"video_processor_type": "Qwen2VLVideoProcessor"}
    del video["image_processor_type"]
    text.write_json(path / "video_preprocessor_config.json", video | {"cap_pixels_per_frame": False})
    (path / "chat_template.jinja").write_text(text.QWEN_VISION_CHAT, encoding="utf-8")
    generation = _qwen_generation(ids) | {"repetition_penalty": 1.05, "temperature": 0.000001}
    _write_model(path, config, generation, ids, seed=105, keep=("<|im_end|>",))


def make_llama(path: Path) -> None:
    """Text only, as a Llama 2 chat checkpoint: float32, untied."""
    ids = text.write_llama_tokenizer(path, (), {"chat_template": text.LLAMA_TEXT_CHAT})
    config = LLAMA_SHAPE | {
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": ids["<s>"],
        "eos_token_id": ids["</s>"],
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "model_type": "llama",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    _write_model(path, config, _llama_generation(ids), ids, seed=1506)


def make_qwen2(path: Path) -> None:
    """Text only, as Qwen/Qwen2-0.5B-Instruct: bfloat16, tied, biases on q, k and v."""
    ids = text.write_qwen_tokenizer(path, text.QWEN_TEXT_SPECIALS, "<|im_end|>", {"chat_template": text.QWEN_TEXT_CHAT})
    config = LLAMA_SHAPE | {
        "architectures": ["Qwen2ForCausalLM"],
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "max_window_layers": 3,
        "model_type": "qwen2",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "sliding_window": 32,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
    }
    _write_model(path, config, _qwen_generation(ids), ids, seed=107, keep=("<|im_end|>",))


def make_mistral(path: Path) -> None:
    """Text only, as mistralai/Mistral-7B-v0.1, with a window of 24 positions in every layer."""
    ids = text.write_llama_tokenizer(path, (), {"chat_template": text.LLAMA_TEXT_CHAT})
    config = LLAMA_SHAPE | {
        "architectures": ["MistralForCausalLM"],
        "bos_token_id": ids["<s>"],
        "eos_token_id": ids["</s>"],
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "model_type": "mistral",
        "rms_norm_eps": 1e-5,
        "sliding_window": 24,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    _write_model(path, config, _llama_generation(ids), ids, seed=208)


def make_gemma2(path: Path) -> None:
    """Text only, as google/gemma-2-2b-it: sliding and full layers in turn, soft caps on scores and logits."""
    _make_gemma(
        path,
        "Gemma2ForCausalLM",
        "gemma2",
        {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "num_hidden_layers": 4},
        seed=1609,
    )


def make_gemma3_text(path: Path) -> None:
    """Text only, as google/gemma-3-1b-it: two sliding layers to a full one, a rotary base for each, q and k norms."""
    _make_gemma(
        path,
        "Gemma3ForCausalLM",
        "gemma3_text",
        {
            "num_hidden_layers": 6,
            "rope_local_base_freq": 10000,
            "rope_theta": 1000000,
            "sliding_window_pattern": 3,
            "use_cache": True,
        },
        seed=510,
    )


TINY: dict[str, Callable[[Path], None]] = {
    "llava": make_llava,
    "llava_next": make_llava_next,
    "llava_onevision": make_llava_onevision,
    "qwen2_vl": make_qwen2_vl,
    "qwen2_5_vl": make_qwen2_5_vl,
    "llama": make_llama,
    "qwen2": make_qwen2,
    "mistral": make_mistral,
    "gemma2": make_gemma2,
    "gemma3_text": make_gemma3_text,
}
"""Family -> the function that writes its checkpoint into an existing empty folder."""

IMAGE_FAMILIES = ("llava", "llava_next", "llava_onevision", "qwen2_vl", "qwen2_5_vl")
VIDEO_FAMILIES = ("llava_onevision", "qwen2_vl", "qwen2_5_vl")
TEXT_FAMILIES = ("llama", "qwen2", "mistral", "gemma2", "gemma3_text")


# --- pieces of several families --------------------------------------------------------------------------------------


def _processor(name: str) -> dict[str, Any]:
    return {"processor_class": name}


def _clip_processor(kind: str, owner: str) -> dict[str, Any]:
    return {
        "crop_size": {"height": 56, "width": 56},
        "do_center_crop": True,
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": CLIP_MEAN,
        "image_processor_type": kind,
        "image_std": CLIP_STD,
        "processor_class": owner,
        "resample": 3,
        "rescale_factor": 1 / 255,
        "size": {"shortest_edge": 56},
    }


def _llava_processor(name: str) -> dict[str, Any]:
    return {
        "image_token": "<image>",
        "num_additional_image_tokens": 1,
        "patch_size": 14,
        "processor_class": name,
        "vision_feature_select_strategy": "default",
    }


def _llama_generation(ids: dict[str, int]) -> dict[str, Any]:
    pad = {"pad_token_id": ids["<pad>"]} if "<pad>" in ids else {}
    return {"bos_token_id": ids["<s>"], "eos_token_id": ids["</s>"]} | pad


def _qwen_generation(ids: dict[str, int]) -> dict[str, Any]:
    return {
        "bos_token_id": ids["<|endoftext|>"],
        "do_sample": True,
        "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]],
        "pad_token_id": ids["<|endoftext|>"],
    }


def _qwen_vl_config(architecture: str, model_type: str, ids: dict[str, int], vision: dict[str, Any]) -> dict[str, Any]:
    return LLAMA_SHAPE | {
        "architectures": [architecture],
        "attention_dropout": 0.0,
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "hidden_act": "silu",
        "image_token_id": ids["<|image_pad|>"],
        "max_position_embeddings": 4096,
        "max_window_layers": 3,
        "model_type": model_type,
        "rms_norm_eps": 1e-6,
        "rope_scaling": {"mrope_section": [2, 3, 3], "type": "mrope"},
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "video_token_id": ids["<|video_pad|>"],
        "vision_config": vision,
        "vision_end_token_id": ids["<|vision_end|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_token_id": ids["<|vision_pad|>"],
    }


def _qwen_vl_pixels(owner: str) -> dict[str, Any]:
    # At most 32 embeddings to a picture or a pair of frames: some of `pictures` are larger and must be shrunk.
    return {
        "image_mean": CLIP_MEAN,
        "image_processor_type": "Qwen2VLImageProcessor",
        "image_std": CLIP_STD,
        "max_pixels": 28 * 28 * 32,
        "merge_size": 2,
        "min_pixels": 56 * 56,
        "patch_size": 14,
        "processor_class": owner,
        "temporal_patch_size": 2,
    }


def _make_gemma(path: Path, architecture: str, model_type: str, own: dict[str, Any], seed: int) -> None:
    ids = text.write_gemma_tokenizer(path, {"chat_template": text.GEMMA_CHAT})
    config = LLAMA_SHAPE | {
        "architectures": [architecture],
        "attention_bias": False,
        "bos_token_id": ids["<bos>"],
        "eos_token_id": ids["<eos>"],
        "head_dim": 16,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 2048,
        "model_type": model_type,
        "pad_token_id": ids["<pad>"],
        "query_pre_attn_scalar": 16,
        "rms_norm_eps": 1e-6,
        "sliding_window": 24,
        "torch_dtype": "bfloat16",
    }
    generation = {
        "bos_token_id": ids["<bos>"],
        "cache_implementation": "hybrid",
        "eos_token_id": [ids["<eos>"], ids["<end_of_turn>"]],
        "pad_token_id": ids["<pad>"],
    }
    _write_model(path, config | own, generation, ids, seed=seed, keep=("<eos>",))


# --- weights ---------------------------------------------------------------------------------------------------------


def _write_model(
    path: Path,
    config: dict[str, Any],
    generation: dict[str, Any],
    ids: dict[str, int],
    *,
    seed: int,
    keep: tuple[str, ...] = ("</s>",),
    shards: str = "1GB",
    adjust: Callable[[Any], None] | None = None,
) -> None:
    """Random weights for `config` under the real checkpoint's names; of the special tokens only `keep` may win.

    `adjust` may change the filled model before it is written.
    """
    import torch
    import transformers

    config = _reshape.get()(config)
    text.write_json(path / "config.json", config)
    loaded = transformers.AutoConfig.from_pretrained(str(path))
    kind = getattr(transformers, config["architectures"][0])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind._from_config(loaded, dtype=torch.float32)
        _fill(model)
    settings = json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8"))
    marks = [entry["content"] for entry in settings["added_tokens_decoder"].values()]
    quiet = [ids[token] for token in marks if token not in keep] + list(range(len(ids), VOCAB))
    # Some heads do not know the last tokens of the table at all.
    quiet = [token for token in quiet if token < len(model.get_output_embeddings().weight)]
    with torch.no_grad():
        # In some families the ids of placeholders lie behind those that the head knows.
        quiet = [token for token in quiet if token < len(model.get_output_embeddings().weight)]
        # Special and padding ids hardly ever win: a placeholder in an answer means nothing to any engine.
        model.get_output_embeddings().weight[quiet] *= 0.05
        if adjust is not None:
            adjust(model)
    for tensor in (*model.parameters(), *model.buffers()):
        # Complex buffers, as Llama 4's tower has one, are no weights.
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(getattr(torch, config["torch_dtype"]))
    model.save_pretrained(path, max_shard_size=shards)
    if model.config.model_type.startswith("llava") and config["vision_config"]["model_type"] != "pixtral":
        _rename(path, "vision_tower.", "vision_tower.vision_model.")
    # What the library writes differs in style from what the real repositories hold.
    text.write_json(path / "config.json", config)
    text.write_json(path / "generation_config.json", generation | {"transformers_version": "4.45.0"})


def _rename(path: Path, old: str, new: str) -> None:
    # The published LLaVA files are older than the library's present tower and keep the name of its inner module.
    from safetensors.torch import load_file, save_file

    def renamed(entries: dict[str, Any]) -> dict[str, Any]:
        return {new + key.removeprefix(old) if key.startswith(old) else key: value for key, value in entries.items()}

    for file in path.glob("*.safetensors"):
        save_file(renamed(load_file(file)), file, metadata={"format": "pt"})
    index = path / "model.safetensors.index.json"
    if index.is_file():
        content = json.loads(index.read_text(encoding="utf-8"))
        text.write_json(index, content | {"weight_map": renamed(content["weight_map"])})


def _fill(model: Any) -> None:
    import torch

    # Some name no head, because it is another class's, or no table.
    last = getattr(model.get_output_embeddings(), "weight", None)
    try:
        first = getattr(model.get_input_embeddings(), "weight", None)
    except NotImplementedError:
        first = None
    family = "gemma" in model.config.model_type
    # Tied embeddings are kept small beside what the layers add: else every answer repeats its last token.
    spread = 0.15 if family else 0.3 if first is last else 0.5
    with torch.no_grad():
        for path, module in model.named_modules():
            norm = "Norm" in type(module).__name__
            gemma = family and "Gemma" in type(module).__name__
            centre = 0 if gemma and not type(module).__name__.startswith(("Gemma3n", "Gemma4")) else 1
            for name, weight in module.named_parameters(recurse=False):
                noise = torch.randn_like(weight)
                if norm and name == "weight":
                    # Gemma's norms before 3n multiply by one plus their weight, and those behind a layer set
                    # how much it adds.
                    weight.copy_(0.2 * noise + centre + (3 if gemma and ".post_" in path else 0))
                elif weight.ndim < 2:
                    weight.copy_((0.2 if name == "bias" else 0.5) * noise)
                elif weight is first or weight is last:
                    weight.copy_(spread * noise)
                elif isinstance(module, torch.nn.Embedding):
                    weight.copy_(0.5 * noise)
                elif "experts" in path and weight.ndim == 3:
                    # A matrix an expert, one way round or the other.
                    weight.copy_(1.5 / weight[0].numel() ** 0.25 * noise)
                else:
                    weight.copy_(1.5 / math.sqrt(weight[0].numel()) * noise)


@cache
def checkpoint(name: str) -> Path:
    """The folder of the tiny checkpoint `name`, a key of TINY or APART.

    It is made if it is not there yet, which is safe between processes.
    """
    target = _cache_folder(name) / name
    with FileLock(str(target) + ".lock"):
        if not target.is_dir():
            draft = target.with_name(f"{name}.{os.getpid()}")
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir()
            (TINY | APART)[name](draft)
            draft.rename(target)
    return target


def plain(name: str) -> Path:
    """The folder of what transformers reads of the tiny checkpoint `name`: its twin, if its weights are quantized."""
    return tiny_quantized.readable(name, checkpoint(name))


def reshaped(name: str, folder: Path, reshape: Callable[[dict[str, Any]], dict[str, Any]]) -> Path:
    """A checkpoint as `name`'s, but of the shape that `reshape` makes of its config.json, in the new `folder`; kept
    by no one. Adapters that the checkpoint brings keep their shape."""
    folder.mkdir(parents=True)
    with reshaping(reshape):
        (TINY | APART)[name](folder)
    return folder


@contextmanager
def reshaping(reshape: Callable[[dict[str, Any]], dict[str, Any]]) -> Iterator[None]:
    """Make checkpoints, those of the census too, of the shape that `reshape` makes of their configuration's entries."""
    token = _reshape.set(reshape)
    try:
        yield
    finally:
        _reshape.reset(token)


def _cache_folder(name: str) -> Path:
    import torch
    import transformers

    key = hashlib.sha256(f"{torch.__version__} {transformers.__version__}".encode())
    # Some are made of others' checkpoints.
    for source in sorted(Path(__file__).parent.glob("tiny*.py")):
        key.update(source.read_bytes())
    root = os.environ.get("BEHELD_TEST_CACHE") or os.path.join(tempfile.gettempdir(), f"beheld-tiny-{os.getuid()}")
    folder = Path(root) / key.hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    return folder


# The other families, made of the pieces above; they stand at the end because they import this module.
from tests import (  # noqa: E402  # noqa: E402
    tiny_adapted,
    tiny_cross,
    tiny_decoders,
    tiny_grid,
    tiny_mamba,
    tiny_masks,
    tiny_more,
    tiny_new,
    tiny_ocr,
    tiny_peculiar,
    tiny_quantized,
    tiny_recurrent,
    tiny_sound,
    tiny_speech,
)

# Families that transformers does not define stand in modules of their own, found by name.
_OWN = tuple(
    importlib.import_module(f"tests.{path.stem}") for path in sorted(Path(__file__).parent.glob("tiny_own_*.py"))
)


def _of_own(name: str) -> tuple[str, ...]:
    return tuple(family for module in _OWN for family in getattr(module, name, ()))


_FURTHER = (
    tiny_more,
    tiny_grid,
    tiny_masks,
    tiny_new,
    tiny_ocr,
    tiny_sound,
    tiny_peculiar,
    tiny_cross,
    tiny_adapted,
    tiny_decoders,
    tiny_recurrent,
    tiny_mamba,
)
for _further in (*_FURTHER, tiny_quantized):
    TINY |= _further.TINY
    IMAGE_FAMILIES += _further.IMAGE_FAMILIES
    VIDEO_FAMILIES += _further.VIDEO_FAMILIES
TEXT_FAMILIES += tiny_decoders.TEXT_FAMILIES
for _own in _OWN:
    TINY |= _own.TINY
    IMAGE_FAMILIES += getattr(_own, "IMAGE_FAMILIES", ())
    VIDEO_FAMILIES += getattr(_own, "VIDEO_FAMILIES", ())
    TEXT_FAMILIES += getattr(_own, "TEXT_FAMILIES", ())
TEXT_FAMILIES += tiny_recurrent.TEXT_FAMILIES + tiny_mamba.TEXT_FAMILIES
APART = tiny_speech.TINY
"""Families whose prompts are unlike the others', each with tests of its own."""
SOUND_FAMILIES = (
    *tiny_sound.SOUND_FAMILIES,
    *tiny_masks.SOUND_FAMILIES,
    *tiny_adapted.SOUND_FAMILIES,
    *_of_own("SOUND_FAMILIES"),
)
THINKERS = tiny_sound.THINKERS
MEDIA_FAMILIES = (*IMAGE_FAMILIES, *(family for family in SOUND_FAMILIES if family not in IMAGE_FAMILIES))
"""Families that take more than text, hence have a processor."""
EVEN_SOUND_FAMILIES = ("qwen3_omni_moe", "gemma3n", "phi4_mm", *_of_own("EVEN_SOUND_FAMILIES"))
"""Families that pad sounds to the longest of a prompt, in processor and tower, which changes the ends of the others;
here each is heard as if it were alone, so that only prompts with sounds of one length are alike."""
JOINED_FAMILIES = (
    "smolvlm",
    "glm4v",
    "glm4v_moe",
    "glm4v_moe_fp8",
    "glm46v",
    "glm_ocr",
    "molmo2",
    *_of_own("JOINED_FAMILIES"),
)
"""Families whose generate() in transformers takes pictures or videos in one prompt, not both: what both together must
give is put together of its parts, see oracle/joined.py."""
TIMED_FAMILIES = (
    "glm4v",
    "glm4v_moe",
    "glm4v_moe_fp8",
    "glm46v",
    "glm_ocr",
    "ernie4_5_vl_moe",
    "molmo2",
    *_of_own("TIMED_FAMILIES"),
)
"""Families whose processor must be told when each frame was."""
ADAPTED_FAMILIES = tiny_adapted.IMAGE_FAMILIES
"""Families whose media are read with adapters of the checkpoint's own; each picture takes hundreds of embeddings."""
WHOLE_FAMILIES = {"gemma3": 23, "gemma4_dense": 71, "molmo2": 113}
"""Families that compute each picture, or all pictures of a prompt, in one step -> the most tokens of one."""
PICTURE_FAMILIES = ("paligemma", "paligemma2", *_of_own("PICTURE_FAMILIES"))
"""Families that answer about pictures only."""
LISTED_FAMILIES = ("got_ocr2", *_of_own("LISTED_FAMILIES"))
"""Families whose processor takes the pictures of a prompt as a plain list, and no prompt without one."""
CHATLESS_FAMILIES = (
    *("paligemma", "paligemma2", "florence2", "voxtral", "got_ocr2"),
    *tiny_peculiar.CHATLESS_FAMILIES,
    *tiny_adapted.IMAGE_FAMILIES,
    *_of_own("CHATLESS_FAMILIES"),
)
"""Families without a chat template, or whose processor takes none."""
UNSHARED_FAMILIES = ("paligemma", "paligemma2", "florence2", *_of_own("UNSHARED_FAMILIES"))
"""Families whose prompts are read both ways, or by an encoder, so that no part of one is another's."""
LONE_FAMILIES = (*tiny_peculiar.LONE_FAMILIES, "florence2", *_of_own("LONE_FAMILIES"))
"""Families that take one picture to a prompt and put it first, whatever the prompt says."""
