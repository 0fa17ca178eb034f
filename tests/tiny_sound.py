"""Small random checkpoints of families that hear: a tower for sound before a language model.

Each is laid out as the checkpoint that its function names; see tiny.py for what they have in common. The towers'
windows are two seconds long where the real ones are thirty, so that a whole one takes 50 embeddings, not 750.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import tiny
from tests import tiny_text as text
from tests.tiny_media import FORMS, QWEN_TURN, SOUND_MARKERS
from tests.tiny_more import qwen_tokens

SEEDS: dict[str, int] = {"qwen2_audio": 1}
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


TINY: dict[str, Callable[[Path], None]] = {"qwen2_audio": make_qwen2_audio}
IMAGE_FAMILIES: tuple[str, ...] = ()
VIDEO_FAMILIES: tuple[str, ...] = ()
SOUND_FAMILIES: tuple[str, ...] = tuple(TINY)
FORMS.update({"qwen2_audio": QWEN_TURN})
SOUND_MARKERS.update({"qwen2_audio": "<|audio_bos|><|AUDIO|><|audio_eos|>"})
