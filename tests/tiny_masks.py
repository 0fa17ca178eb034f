"""Small random checkpoints of families whose attention also looks ahead: Gemma 3, PaliGemma and PaliGemma 2.

Each is laid out as the checkpoint that its function names; see tiny.py for what they have in common.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import tiny
from tests import tiny_text as text
from tests.tiny_media import FORMS, GEMMA_TURN, MARKERS, SOUND_MARKERS
from tests.tiny_more import SIGLIP, chat, language, pixels

SEEDS: dict[str, int] = {"gemma3n": 1, "gemma4": 11, "gemma4_dense": 2, "gemma3": 7, "paligemma": 5, "paligemma2": 5}
"""Family -> the seed of its weights; chosen so that greedy choices are clear (see oracle/test_tiny.py)."""

GEMMA = {
    "head_dim": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 16,
    "rms_norm_eps": 1e-6,
}


def gemma_tokens(path: Path, owner: str, extra: dict[str, str], form: str) -> dict[str, int]:
    """A tokenizer as Gemma has it with further named tokens."""
    if form:
        (path / "chat_template.jinja").write_text(form, encoding="utf-8")
    return text.write_gemma_tokenizer(path, {"processor_class": owner, **extra}, tuple(extra.values()))


def generation(ids: dict[str, int]) -> dict[str, Any]:
    """A generation_config.json."""
    return {"bos_token_id": ids["<bos>"], "eos_token_id": ids["<eos>"], "pad_token_id": ids["<pad>"]}


def make_gemma3(path: Path) -> None:
    """As google/gemma-3-4b-it: pictures read both ways, also beyond the window of the sliding layers."""
    named = {
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    }
    form = chat("<start_of_turn>%role%\\n", "<end_of_turn>\\n", "<start_of_image>", bos="<bos>")
    form += "{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}"
    ids = gemma_tokens(path, "Gemma3Processor", named, form)
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": ids["<start_of_image>"],
        "eoi_token_index": ids["<end_of_image>"],
        "eos_token_id": [ids["<eos>"], ids["<end_of_turn>"]],
        "image_token_index": ids["<image_soft_token>"],
        "mm_tokens_per_image": 16,
        "model_type": "gemma3",
        "text_config": language("gemma3_text", "Gemma3ForCausalLM", **GEMMA)
        | {
            "num_hidden_layers": 4,
            "rope_local_base_freq": 10000.0,
            "rope_theta": 1000000.0,
            "sliding_window": 12,
            "sliding_window_pattern": 2,
        },
        "torch_dtype": "bfloat16",
        "vision_config": SIGLIP | {"image_size": 112},
    }
    size = {"size": {"height": 112, "width": 112}, "image_seq_length": 16, "do_pan_and_scan": None}
    files = pixels("Gemma3ImageProcessor", "Gemma3Processor", **size, image_mean=tiny.HALF, image_std=tiny.HALF)
    text.write_json(path / "preprocessor_config.json", files)
    text.write_json(path / "processor_config.json", {"image_seq_length": 16, "processor_class": "Gemma3Processor"})
    tiny._write_model(path, config, generation(ids), ids, seed=SEEDS["gemma3"], keep=("<eos>",))


def make_paligemma(path: Path) -> None:
    """As google/paligemma-3b-mix-224: the whole prompt read both ways, pictures before it."""
    own = {"architectures": ["GemmaForCausalLM"], "model_type": "gemma"}
    _paligemma(path, "paligemma", language("gemma", "GemmaForCausalLM", **GEMMA) | own)


def make_paligemma2(path: Path) -> None:
    """As google/paligemma2-3b-ft-docci-448: over Gemma 2 with its caps and sliding layers."""
    own = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window": 4096}
    _paligemma(path, "paligemma2", language("gemma2", "Gemma2ForCausalLM", **GEMMA, **own) | {"num_hidden_layers": 4})


def _paligemma(path: Path, name: str, language_config: dict[str, Any]) -> None:
    ids = gemma_tokens(path, "PaliGemmaProcessor", {"image_token": "<image>"}, "")
    config = {
        "architectures": ["PaliGemmaForConditionalGeneration"],
        "bos_token_id": ids["<bos>"],
        "eos_token_id": ids["<eos>"],
        "hidden_size": 64,
        "image_token_index": ids["<image>"],
        "model_type": "paligemma",
        "pad_token_id": ids["<pad>"],
        "projection_dim": 64,
        "text_config": language_config | {"num_image_tokens": 16},
        "torch_dtype": "bfloat16",
        "vision_config": SIGLIP | {"projection_dim": 64, "num_image_tokens": 16},
    }
    size = {"size": {"height": 56, "width": 56}, "image_seq_length": 16}
    files = pixels("SiglipImageProcessor", "PaliGemmaProcessor", **size, image_mean=tiny.HALF, image_std=tiny.HALF)
    text.write_json(path / "preprocessor_config.json", files)
    tiny._write_model(path, config, generation(ids), ids, seed=SEEDS[name], keep=("<eos>",))


def make_gemma3n(path: Path) -> None:
    """As google/gemma-3n-E2B-it: four streams, sparse and per-layer inputs, shared caches, a tower of timm's.

    The tower is a small one of like blocks. The last ids have embeddings of the picture's and the sound's own.
    """
    named = {
        "boa_token": "<start_of_audio>",
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
        "eoa_token": "<end_of_audio>",
        "audio_token": "<audio_soft_token>",
    }
    marks = ("<image_soft_token>", "", "<audio_soft_token>")
    form = chat("<start_of_turn>%role%\\n", "<end_of_turn>\\n", *marks, bos="<bos>")
    form += "{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}"
    ids = gemma_tokens(path, "Gemma3nProcessor", named, form)
    # Text, then what is of pictures, then what is of sounds.
    pictures, sounds = ids["<end_of_image>"], ids["<end_of_audio>"]
    config = {
        "architectures": ["Gemma3nForConditionalGeneration"],
        "audio_config": {
            "conf_attention_chunk_size": 4,
            "conf_attention_context_left": 5,
            "conf_num_attention_heads": 2,
            "conf_num_hidden_layers": 1,
            "hidden_size": 32,
            "model_type": "gemma3n_audio",
            "sscp_conv_channel_size": [8, 4],
            "vocab_offset": sounds,
            "vocab_size": tiny.VOCAB - sounds,
        },
        "audio_soft_tokens_per_image": 20,
        "audio_token_id": ids["<audio_soft_token>"],
        "boa_token_id": ids["<start_of_audio>"],
        "boi_token_id": ids["<start_of_image>"],
        "eoa_token_id": ids["<end_of_audio>"],
        "eoi_token_id": ids["<end_of_image>"],
        "eos_token_id": [ids["<eos>"], ids["<end_of_turn>"]],
        "image_token_id": ids["<image_soft_token>"],
        "model_type": "gemma3n",
        "text_config": language("gemma3n_text", "Gemma3nForCausalLM", **GEMMA)
        | {
            # Half of a layer's numbers, not the real 19 of 20: of so few the rest would be rounding for the most part.
            "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0, 0.0, 0.0],
            "altup_num_inputs": 4,
            "final_logit_softcapping": 30.0,
            "hidden_size_per_layer_input": 8,
            "intermediate_size": [96] * 6,
            "laurel_rank": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_hidden_layers": 6,
            "num_kv_shared_layers": 2,
            "pad_token_id": 0,
            "rope_local_base_freq": 10000.0,
            "rope_theta": 1000000.0,
            "sliding_window": 40,
            "vocab_size_per_layer_input": pictures,
        },
        "torch_dtype": "bfloat16",
        "vision_config": {
            "architecture": "test_efficientnet",
            "do_pooling": False,
            "hidden_size": 256,
            "label_names": ["LABEL_0", "LABEL_1"],
            "model_type": "gemma3n_vision",
            "num_classes": 2,
            "vocab_offset": pictures,
            "vocab_size": sounds - pictures,
        },
        "vision_soft_tokens_per_image": 16,
    }
    size = {"size": {"height": 128, "width": 128}, "image_mean": tiny.HALF, "image_std": tiny.HALF}
    files = pixels("SiglipImageProcessor", "Gemma3nProcessor", **size) | {"do_normalize": False}
    ears = {"feature_extractor_type": "Gemma3nAudioFeatureExtractor", "feature_size": 128, "sampling_rate": 16000}
    text.write_json(path / "preprocessor_config.json", files | ears)
    owner = {"audio_seq_length": 20, "image_seq_length": 16, "processor_class": "Gemma3nProcessor"}
    text.write_json(path / "processor_config.json", owner)

    def calm(model: Any) -> None:
        # Streams mixed at random widen rounding; those of a trained model hardly mix.
        for name, weight in model.named_parameters():
            if "coefs" in name:
                weight *= 0.3
            elif ".post_" in name:
                weight -= 2

    tiny._write_model(path, config, generation(ids), ids, seed=SEEDS["gemma3n"], keep=("<eos>",), adjust=calm)


GEMMA4_MARKS = {
    "audio_token": "<|audio|>",
    "boa_token": "<|audio>",
    "boi_token": "<|image>",
    "eoa_token": "<audio|>",
    "eoi_token": "<image|>",
    "image_token": "<|image|>",
    "video_token": "<|video|>",
}


def make_gemma4(path: Path) -> None:
    """As google/gemma-4-E2B-it: per-layer embeddings, layers that read another's cache, a tower for sound."""
    ears = {
        "attention_chunk_size": 6,
        "attention_context_left": 7,
        "attention_context_right": 0,
        "conv_kernel_size": 5,
        "hidden_act": "silu",
        "hidden_size": 32,
        "model_type": "gemma4_audio",
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "output_proj_dims": 48,
        "subsampling_conv_channels": [16, 8],
        "use_clipped_linears": True,
    }
    own = {"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2, "vocab_size_per_layer_input": tiny.VOCAB}
    _gemma4(path, "gemma4", own | {"use_double_wide_mlp": True}, ears)


def make_gemma4_dense(path: Path) -> None:
    """As google/gemma-4-31B-it: pictures read both ways, full layers whose values are their keys."""
    own = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "use_bidirectional_attention": "vision"}
    plain = {"final_logit_softcapping": None, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}
    _gemma4(path, "gemma4_dense", own | plain)


def _gemma4(path: Path, name: str, own: dict[str, Any], ears: dict[str, Any] | None = None) -> None:
    form = chat("<start_of_turn>%role%\\n", "<end_of_turn>\\n", "<|image|>", "<|video|>", "<|audio|>", bos="<bos>")
    form += "{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}"
    ids = gemma_tokens(path, "Gemma4Processor", GEMMA4_MARKS, form)
    config = {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "audio_config": ears,
        "audio_token_id": ids["<|audio|>"],
        "boi_token_id": ids["<|image>"],
        "eoi_token_id": ids["<image|>"],
        "image_token_id": ids["<|image|>"],
        "model_type": "gemma4",
        "text_config": language("gemma4_text", "Gemma4ForCausalLM", **GEMMA)
        | {
            "final_logit_softcapping": 30.0,
            "global_head_dim": 32,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_hidden_layers": 4,
            "pad_token_id": 0,
            "sliding_window": 40,
        }
        | own,
        "torch_dtype": "bfloat16",
        "video_token_id": ids["<|video|>"],
        "vision_config": {
            "head_dim": 16,
            "hidden_size": 32,
            "intermediate_size": 48,
            "model_type": "gemma4_vision",
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
            "patch_size": 16,
            "pooling_kernel_size": 3,
            "position_embedding_size": 256,
        },
    }
    del config["text_config"]["rope_theta"]
    image = {"image_processor_type": "Gemma4ImageProcessor", "max_soft_tokens": 70, "patch_size": 16}
    video = {"video_processor_type": "Gemma4VideoProcessor", "max_soft_tokens": 70, "num_frames": 4, "patch_size": 16}
    sound = {"feature_extractor_type": "Gemma4AudioFeatureExtractor", "feature_size": 16, "sampling_rate": 16000}
    # One file holds the settings of all parts.
    parts = {"feature_extractor": sound, "image_processor": image, "video_processor": video}
    text.write_json(path / "processor_config.json", {"processor_class": "Gemma4Processor", **parts})
    tiny._write_model(path, config, generation(ids), ids, seed=SEEDS[name], keep=("<eos>",))


TINY: dict[str, Callable[[Path], None]] = {
    "gemma4": make_gemma4,
    "gemma4_dense": make_gemma4_dense,
    "gemma3": make_gemma3,
    "gemma3n": make_gemma3n,
    "paligemma": make_paligemma,
    "paligemma2": make_paligemma2,
}
IMAGE_FAMILIES = tuple(TINY)
VIDEO_FAMILIES = ("gemma4", "gemma4_dense")
SOUND_FAMILIES = ("gemma3n", "gemma4")
SOUND_MARKERS.update({"gemma3n": "<audio_soft_token>", "gemma4": "<|audio|>"})
FORMS.update(dict.fromkeys(("gemma4", "gemma4_dense"), GEMMA_TURN))
MARKERS.update(dict.fromkeys(("gemma4", "gemma4_dense"), ("<|image|>", "<|video|>")))
FORMS.update({"gemma3": GEMMA_TURN, "gemma3n": GEMMA_TURN, "paligemma": "{}", "paligemma2": "{}"})
MARKERS.update(
    {
        "gemma3": ("<start_of_image>", ""),
        "gemma3n": ("<image_soft_token>", ""),
        "paligemma": ("<image>", ""),
        "paligemma2": ("<image>", ""),
    }
)
