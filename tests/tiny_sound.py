"""Small random checkpoints of families that hear: a tower for sound before a language model.

Each is laid out as the checkpoint that its function names; see tiny.py for what they have in common. The towers'
windows are two seconds long where the real ones are thirty, so that a whole one takes 50 embeddings, not 750.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import tiny
from tests import tiny_text as text
from tests.tiny_media import FORMS, MARKERS, QWEN_MARKERS, QWEN_TURN, SOUND_MARKERS
from tests.tiny_more import qwen_tokens

SEEDS: dict[str, int] = {"qwen2_audio": 1, "qwen2_5_omni": 1, "qwen3_omni_moe": 10, "voxtral": 3}
"""Family -> the seed of its weights; chosen so that greedy choices are clear (see oracle/test_tiny.py)."""

WINDOW_S = 2
"""Seconds that a Whisper-like tower hears at once."""

EARS = {
    "activation_dropout": 0.0,
    "activation_function": "gelu",
    "attention_dropout": 0.0,
    "d_model": 32,
    "dropout": 0.0,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "encoder_layerdrop": 0.0,
    "encoder_layers": 2,
    "max_source_positions": 50 * WINDOW_S,
    "num_mel_bins": 16,
    "scale_embedding": False,
}
"""An audio_config after Whisper's."""


def whisper_features(owner: str, **own: Any) -> dict[str, Any]:
    """A preprocessor_config.json of Whisper's features."""
    return {
        "chunk_length": WINDOW_S,
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": 16,
        "hop_length": 160,
        "n_fft": 400,
        "n_samples": 16000 * WINDOW_S,
        "nb_max_frames": 100 * WINDOW_S,
        "padding_side": "right",
        "padding_value": 0.0,
        "processor_class": owner,
        "return_attention_mask": True,
        "sampling_rate": 16000,
    } | own


# --- Qwen2-Audio -----------------------------------------------------------------------------------------------------

QWEN2_AUDIO_CHAT = """{%- set heard = namespace(value=0) -%}
{%- for message in messages -%}
{%- if loop.first and message['role'] != 'system' -%}
{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' -}}
{%- endif -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] + '<|im_end|>\\n' -}}
{%- else -%}
{%- for content in message['content'] -%}
{%- if 'audio' in content or 'audio_url' in content or message['type'] == 'audio' -%}
{%- set heard.value = heard.value + 1 -%}
{{- 'Audio ' ~ heard.value ~ ': <|audio_bos|><|AUDIO|><|audio_eos|>\\n' -}}
{%- elif 'text' in content -%}
{{- content['text'] -}}
{%- endif -%}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""
"""The real template looks for the key 'audio' of a part, not for its type."""


def make_qwen2_audio(path: Path) -> None:
    """As Qwen/Qwen2-Audio-7B-Instruct: Whisper's tower, halved by pooling, before Qwen2."""
    marks = ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")
    ids = qwen_tokens(path, "Qwen2AudioProcessor", marks, {"chat_template": QWEN2_AUDIO_CHAT})
    config = {
        "architectures": ["Qwen2AudioForConditionalGeneration"],
        "audio_config": EARS | {"model_type": "qwen2_audio_encoder"},
        "audio_token_index": ids["<|AUDIO|>"],
        "ignore_index": -100,
        "model_type": "qwen2_audio",
        "text_config": tiny.LLAMA_SHAPE
        | {
            "bos_token_id": ids["<|endoftext|>"],
            "eos_token_id": ids["<|im_end|>"],
            "max_position_embeddings": 8192,
            "model_type": "qwen2",
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000,
            "sliding_window": 32768,
            "torch_dtype": "bfloat16",
            "use_mrope": False,
        },
        "torch_dtype": "bfloat16",
    }
    text.write_json(path / "preprocessor_config.json", whisper_features("Qwen2AudioProcessor"))
    tiny._write_model(path, config, tiny._qwen_generation(ids), ids, seed=SEEDS["qwen2_audio"], keep=("<|im_end|>",))


# --- Qwen-Omni: the part that reads, sees and hears, in the repository of a model that also speaks -------------------

OMNI_TOKENS = {
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
    "audio_token": "<|AUDIO|>",
    "image_token": "<|IMAGE|>",
    "video_token": "<|VIDEO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
}
OMNI_CHAT = """{%- for message in messages -%}
{%- if loop.first and message['role'] != 'system' -%}
{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' -}}
{%- endif -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for content in message['content'] -%}
{%- if content['type'] == 'image' or 'image' in content or 'image_url' in content -%}
{{- '<|vision_bos|><|IMAGE|><|vision_eos|>' -}}
{%- elif content['type'] == 'audio' or 'audio' in content or 'audio_url' in content -%}
{{- '<|audio_bos|><|AUDIO|><|audio_eos|>' -}}
{%- elif content['type'] == 'video' or 'video' in content -%}
{{- '<|vision_bos|><|VIDEO|><|vision_eos|>' -}}
{%- elif 'text' in content -%}
{{- content['text'] -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""
QWEN3_OMNI_TOKENS = {
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
    "audio_token": "<|audio_pad|>",
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
}
THINKERS = {
    "qwen2_5_omni": "Qwen2_5OmniThinkerForConditionalGeneration",
    "qwen3_omni_moe": "Qwen3OmniMoeThinkerForConditionalGeneration",
}
"""Family -> the class of the part that reads."""


def make_qwen2_5_omni(path: Path) -> None:
    """As Qwen/Qwen2.5-Omni-7B: three kinds of media on three axes; weights of the speaking parts beside them."""
    owner = "Qwen2_5OmniProcessor"
    ids = qwen_tokens(path, owner, tuple(OMNI_TOKENS.values()), OMNI_TOKENS | {"chat_template": OMNI_CHAT})
    thinker = {
        "architectures": ["Qwen2OmniNaViTThinkerForConditionalGeneration"],
        "audio_config": EARS | {"model_type": "qwen2_5_omni_audio_encoder", "n_window": 10, "output_dim": 64},
        "audio_end_token_id": ids["<|audio_eos|>"],
        "audio_start_token_id": ids["<|audio_bos|>"],
        "audio_token_index": ids["<|AUDIO|>"],
        "bos_token_id": ids["<|im_start|>"],
        "eos_token_id": ids["<|im_end|>"],
        "ignore_index": -100,
        "image_token_index": ids["<|IMAGE|>"],
        "model_type": "qwen2_5_omni_thinker",
        "pad_token_id": ids["<|endoftext|>"],
        "position_id_per_seconds": 25,
        "seconds_per_chunk": 2,
        "text_config": tiny.LLAMA_SHAPE
        | {
            "max_position_embeddings": 4096,
            "model_type": "qwen2_5_omni_text",
            "rms_norm_eps": 1e-6,
            "rope_scaling": {"mrope_section": [2, 3, 3], "rope_type": "default", "type": "default"},
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "use_sliding_window": False,
        },
        "torch_dtype": "bfloat16",
        "video_token_index": ids["<|VIDEO|>"],
        "vision_config": {
            "depth": 3,
            "fullatt_block_indexes": [1],
            "hidden_act": "silu",
            "hidden_size": 32,
            "in_channels": 3,
            "intermediate_size": 48,
            "model_type": "qwen2_5_omni_vision_encoder",
            "num_heads": 2,
            "out_hidden_size": 64,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 56,
        },
        "vision_end_token_id": ids["<|vision_eos|>"],
        "vision_start_token_id": ids["<|vision_bos|>"],
    }
    # Sounds may be longer than the tower's window, which is heard piece by piece; files of all parts are one.
    features = whisper_features(owner, chunk_length=20, n_samples=320000, nb_max_frames=2000, dither=0.0)
    text.write_json(path / "preprocessor_config.json", features | tiny._qwen_vl_pixels(owner))
    _omni(path, "qwen2_5_omni", "Qwen2_5OmniModel", thinker, ids, {"talker_config": {}, "token2wav_config": {}})


def make_qwen3_omni_moe(path: Path) -> None:
    """As Qwen/Qwen3-Omni-30B-A3B-Instruct: experts, tower layers that enter the text, sounds in chunks of a second."""
    owner = "Qwen3OmniMoeProcessor"
    form = OMNI_CHAT
    for name, token in OMNI_TOKENS.items():
        form = form.replace(token, QWEN3_OMNI_TOKENS[name])
    marks = tuple(QWEN3_OMNI_TOKENS.values())
    ids = qwen_tokens(path, owner, marks, QWEN3_OMNI_TOKENS | {"chat_template": form})
    ears = {"conv_chunksize": 3, "downsample_hidden_size": 8, "n_window": 50, "n_window_infer": 200, "output_dim": 64}
    thinker = {
        "audio_config": EARS | ears | {"model_type": "qwen3_omni_moe_audio_encoder"},
        "audio_end_token_id": ids["<|audio_end|>"],
        "audio_start_token_id": ids["<|audio_start|>"],
        "audio_token_id": ids["<|audio_pad|>"],
        "dtype": "bfloat16",
        "image_token_id": ids["<|image_pad|>"],
        "model_type": "qwen3_omni_moe_thinker",
        "position_id_per_seconds": 13,
        "seconds_per_chunk": 2,
        "text_config": tiny.LLAMA_SHAPE
        | {
            "decoder_sparse_step": 1,
            "head_dim": 16,
            "max_position_embeddings": 4096,
            "model_type": "qwen3_omni_moe_text",
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "rms_norm_eps": 1e-6,
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [4, 2, 2], "rope_type": "default"},
            "rope_theta": 1000000,
            "tie_word_embeddings": False,
        },
        "video_token_id": ids["<|video_pad|>"],
        "vision_config": {
            "deepstack_visual_indexes": [0, 1],
            "depth": 3,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 32,
            "in_channels": 3,
            "intermediate_size": 48,
            "model_type": "qwen3_omni_moe_vision_encoder",
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
    features = whisper_features(owner, chunk_length=20, n_samples=320000, nb_max_frames=2000, dither=0.0)
    pixels = tiny._qwen_vl_pixels(owner) | {"image_mean": tiny.HALF, "image_std": tiny.HALF}
    text.write_json(path / "preprocessor_config.json", features | pixels)
    further = {"talker_config": {}, "code2wav_config": {}}
    _omni(path, "qwen3_omni_moe", "Qwen3OmniMoeForConditionalGeneration", thinker, ids, further)


def _omni(
    path: Path, name: str, architecture: str, thinker: dict[str, Any], ids: dict[str, int], further: dict[str, Any]
) -> None:
    """Write the thinker, then what makes it the repository of a model that speaks."""
    config = thinker | {"architectures": [THINKERS[name]], "torch_dtype": "bfloat16"}
    tiny._write_model(path, config, tiny._qwen_generation(ids), ids, seed=SEEDS[name], keep=("<|im_end|>",))
    # What was written may be of another shape (tiny.reshaped).
    thinker = {key: value for key, value in json.loads((path / "config.json").read_text()).items() if key in thinker}
    whole = {"architectures": [architecture], "model_type": name, "thinker_config": thinker, "torch_dtype": "bfloat16"}
    text.write_json(path / "config.json", whole | further)
    _add_speech(path / "model.safetensors", [f"{part.removesuffix('_config')}.model.norm.weight" for part in further])


def _add_speech(file: Path, names: list[str]) -> None:
    """Weights of the speaking parts, and the prefix that the others have beside them."""
    import torch
    from safetensors.torch import load_file, save_file

    kept = {key if key.startswith("thinker.") else f"thinker.{key}": value for key, value in load_file(file).items()}
    save_file(kept | {name: torch.ones(8) for name in names}, file, metadata={"format": "pt"})


# --- Voxtral ---------------------------------------------------------------------------------------------------------

TEKKEN_SPECIALS = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
    *(f"<SPECIAL_{number}>" for number in range(20, 24)),
    *("[AUDIO]", "[BEGIN_AUDIO]"),
    *(f"<SPECIAL_{number}>" for number in range(26, 34)),
    "[TRANSCRIBE]",
)
"""In the order of their ids."""


def make_voxtral(path: Path) -> None:
    """As mistralai/Voxtral-Mini-3B-2507: Mistral's tokenizer file, no chat template, no tokenizer_config.json.

    The processor's windows are thirty seconds whatever the files say; here one takes 75 embeddings, not 375.
    """
    spectrogram = {"hop_length": 160, "num_mel_bins": 16, "window_size": 400}
    audio = {"audio_encoding_config": spectrogram, "chunk_length_s": 30.0, "frame_rate": 2.5, "sampling_rate": 16000}
    ids = text.write_tekken(path, TEKKEN_SPECIALS, audio)
    config = {
        "architectures": ["VoxtralForConditionalGeneration"],
        "audio_config": {
            "activation_function": "gelu",
            "attention_dropout": 0.0,
            "hidden_size": 32,
            "intermediate_size": 640,
            "max_source_positions": 1500,
            "model_type": "voxtral_encoder",
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
            "num_mel_bins": 16,
            "scale_embedding": False,
        },
        "audio_token_id": ids["[AUDIO]"],
        "model_type": "voxtral",
        "projector_hidden_act": "gelu",
        "text_config": tiny.LLAMA_SHAPE
        | {
            "head_dim": 24,
            "max_position_embeddings": 4096,
            "model_type": "llama",
            "rms_norm_eps": 1e-5,
            "rope_theta": 100000000.0,
        },
        "torch_dtype": "bfloat16",
    }
    whole = {"chunk_length": 30, "n_samples": 480000, "nb_max_frames": 3000}
    text.write_json(path / "preprocessor_config.json", whisper_features("VoxtralProcessor", **whole))
    marks = {str(number): {"content": token} for number, token in enumerate(TEKKEN_SPECIALS)}
    text.write_json(path / "tokenizer_config.json", {"added_tokens_decoder": marks})
    generation = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 11}
    tiny._write_model(path, config, generation, ids, seed=SEEDS["voxtral"])
    (path / "tokenizer_config.json").unlink()


TINY: dict[str, Callable[[Path], None]] = {
    "qwen2_audio": make_qwen2_audio,
    "qwen2_5_omni": make_qwen2_5_omni,
    "qwen3_omni_moe": make_qwen3_omni_moe,
    "voxtral": make_voxtral,
}
IMAGE_FAMILIES: tuple[str, ...] = tuple(THINKERS)
VIDEO_FAMILIES: tuple[str, ...] = IMAGE_FAMILIES
SOUND_FAMILIES: tuple[str, ...] = tuple(TINY)
FORMS.update(dict.fromkeys(TINY, QWEN_TURN))
OMNI_MARKERS = ("<|vision_bos|><|IMAGE|><|vision_eos|>", "<|vision_bos|><|VIDEO|><|vision_eos|>")
MARKERS.update({"qwen2_5_omni": OMNI_MARKERS, "qwen3_omni_moe": QWEN_MARKERS})
SOUND_MARKERS.update(dict.fromkeys(TINY, "<|audio_bos|><|AUDIO|><|audio_eos|>"))
FORMS["voxtral"] = "<s>[INST]{}[/INST]"
SOUND_MARKERS["voxtral"] = "[BEGIN_AUDIO][AUDIO]"
SOUND_MARKERS["qwen3_omni_moe"] = "<|audio_start|><|audio_pad|><|audio_end|>"
