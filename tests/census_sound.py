"""Recipes of types that only hear; see census_media.py."""

from __future__ import annotations

from typing import Any

import transformers

from tests.census_media import LANGUAGE, Recipe
from tests.tiny_sound import WINDOW_S

_BINS = 16
_FEATURES: dict[str, Any] = {
    "chunk_length": WINDOW_S,
    "feature_size": _BINS,
    "hop_length": 160,
    "n_fft": 400,
    "sampling_rate": 16000,
}
# An audio_config of Whisper's sizes under the names of newer classes.
_WHISPER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "max_source_positions": 50 * WINDOW_S,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "num_mel_bins": _BINS,
}
_VIBES = {
    "depths": [1] * 7,
    "hidden_size": 16,
    "num_filters": 2,
}


def _granite(kind: str, encoder: dict[str, Any], projector: dict[str, Any]) -> Recipe:
    sizes = {"context_size": 20, "hidden_dim": 32, "max_pos_emb": 40, "num_heads": 2}
    return Recipe(
        ("<|audio|>",),
        lambda ids: {
            "audio_token_index": ids["<|audio|>"],
            "encoder_config": {"model_type": f"{kind}_encoder", "num_layers": 2, "output_dim": 8, **sizes, **encoder},
            "has_lora_adapter": False,
            "projector_config": {
                "model_type": "blip_2_qformer",
                "encoder_hidden_size": 32,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_attention_heads": 2,
                "num_hidden_layers": 2,
                **projector,
            },
            "text_config": {"model_type": "granite", **LANGUAGE},
        },
        lambda tokenizer: transformers.GraniteSpeechProcessor(transformers.GraniteSpeechFeatureExtractor(), tokenizer),
        audio="<|audio|>",
    )


RECIPES: dict[str, Recipe] = {
    "moss_transcribe_diarize": Recipe(
        ("<|audio_pad|>", "<|audio_start|>", "<|audio_end|>"),
        lambda ids: {
            "audio_chunk_size": 16000 * WINDOW_S,
            "audio_config": _WHISPER,
            "audio_token_id": ids["<|audio_pad|>"],
            "text_config": {"model_type": "qwen3", **LANGUAGE},
        },
        lambda tokenizer: transformers.MossTranscribeDiarizeProcessor(
            transformers.MossTranscribeDiarizeFeatureExtractor(**_FEATURES), tokenizer, time_marker_every_seconds=1
        ),
        audio="<|audio_start|><|audio_pad|><|audio_end|>",
    ),
    "musicflamingo": Recipe(
        ("<sound>", "<|sound_bos|>", "<|sound_eos|>"),
        lambda ids: {
            "audio_bos_token_id": ids["<|sound_bos|>"],
            "audio_config": {"model_type": "audioflamingo3_encoder", **_WHISPER},
            "audio_eos_token_id": ids["<|sound_eos|>"],
            "audio_token_id": ids["<sound>"],
            "text_config": {"model_type": "qwen2", **LANGUAGE},
        },
        lambda tokenizer: transformers.MusicFlamingoProcessor(
            transformers.WhisperFeatureExtractor(**_FEATURES, return_attention_mask=True), tokenizer
        ),
        audio="<sound>",
        # Its processor takes as many texts as sounds.
        most=1,
    ),
    "vibevoice_asr": Recipe(
        ("<|box_start|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|AUDIO_DURATION|>"),
        lambda ids: {
            "acoustic_tokenizer_chunk_size": 32000,
            "acoustic_tokenizer_encoder_config": {"model_type": "vibevoice_acoustic_tokenizer_encoder", **_VIBES},
            "audio_bos_token_id": ids["<|object_ref_start|>"],
            "audio_eos_token_id": ids["<|object_ref_end|>"],
            "audio_token_id": ids["<|box_start|>"],
            "semantic_tokenizer_encoder_config": {
                "model_type": "vibevoice_acoustic_tokenizer_encoder",
                **_VIBES,
                "hidden_size": 24,
            },
            "text_config": {"model_type": "qwen2", **LANGUAGE},
        },
        lambda tokenizer: transformers.VibeVoiceAsrProcessor(
            transformers.VibeVoiceAcousticTokenizerFeatureExtractor(sampling_rate=24000), tokenizer
        ),
        audio="<|object_ref_start|><|box_start|><|object_ref_end|>",
        rate=24000,
        options={"sample": False},
    ),
    "granite_speech": _granite("granite_speech", {}, {}),
    "granite_speech_plus": _granite("granite_speech_plus", {"cat_hidden_layers": [1]}, {"encoder_hidden_size": 64}),
    "fun_asr_nano": Recipe(
        ("<|object_ref_start|>",),
        lambda ids: {
            "adaptor_config": {
                "hidden_size": 64,
                "intermediate_size": 16,
                "num_attention_heads": 2,
                "projector_hidden_size": 48,
            },
            "audio_config": {
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_attention_heads": 2,
                "num_hidden_layers": 4,
                "num_mel_bins": _BINS,
                "num_timestamp_prediction_layers": 1,
            },
            "audio_token_id": ids["<|object_ref_start|>"],
            "text_config": {"model_type": "qwen3", **LANGUAGE},
        },
        lambda tokenizer: transformers.FunAsrNanoProcessor(
            transformers.FunAsrNanoFeatureExtractor(feature_size=_BINS), tokenizer
        ),
        audio="<|object_ref_start|>",
        # Its processor takes as many texts as sounds.
        most=1,
    ),
}
