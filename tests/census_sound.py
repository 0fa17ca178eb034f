"""Recipes of types that only hear; see census_media.py."""

from __future__ import annotations

from typing import Any

import transformers

from tests import tiny
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
_CONFORMER = {
    "conv_kernel_size": 5,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "num_mel_bins": _BINS,
    "subsampling_conv_channels": 8,
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
            # Tied, it would answer with the audio's token, which transformers embeds as token 0.
            "tie_word_embeddings": False,
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
        # Of several, transformers hears the silence that fills up the shorter ones.
        most=1,
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
        generating={"sample": False},
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
    "moonshine": Recipe(
        ("<s>",),
        lambda ids: {
            "bos_token_id": ids["<s>"],
            "decoder_num_hidden_layers": 2,
            "decoder_start_token_id": ids["<s>"],
            "encoder_num_attention_heads": 4,
            "encoder_num_hidden_layers": 2,
            "hidden_size": 64,
            "decoder_num_attention_heads": 4,
            "intermediate_size": 96,
            "max_position_embeddings": 1024,
            "pad_head_dim_to_multiple_of": 24,
            "vocab_size": tiny.VOCAB,
        },
        lambda tokenizer: transformers.Wav2Vec2Processor(
            transformers.Wav2Vec2FeatureExtractor(do_normalize=False, return_attention_mask=True), tokenizer
        ),
        audio="<s>",
        most=1,
        start="<s>",
    ),
    "speech-encoder-decoder": Recipe(
        ("<pad>", "</s>"),
        lambda ids: {
            "decoder": {
                "model_type": "mbart",
                "add_cross_attention": True,
                "bos_token_id": ids["</s>"],
                "d_model": 64,
                "decoder_attention_heads": 4,
                "decoder_ffn_dim": 96,
                "decoder_layers": 2,
                "forced_eos_token_id": None,
                "is_decoder": True,
                "is_encoder_decoder": False,
                "max_position_embeddings": 256,
                "vocab_size": tiny.VOCAB,
            },
            "decoder_start_token_id": ids["</s>"],
            "encoder": {
                "model_type": "wav2vec2",
                "add_adapter": True,
                "conv_dim": [32] * 3,
                "conv_kernel": [10, 8, 8],
                "conv_stride": [8, 8, 8],
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_adapter_layers": 1,
                "num_attention_heads": 2,
                "num_conv_pos_embedding_groups": 4,
                "num_conv_pos_embeddings": 8,
                "num_hidden_layers": 2,
                "output_hidden_size": 32,
            },
        },
        lambda tokenizer: transformers.Wav2Vec2Processor(
            transformers.Wav2Vec2FeatureExtractor(return_attention_mask=False), tokenizer
        ),
        audio="</s>",
        most=1,
        room=256,
        start="</s>",
    ),
    "speecht5": Recipe(
        ("<pad>", "</s>"),
        lambda ids: {
            "conv_dim": [32] * 3,
            "conv_kernel": [10, 8, 8],
            "conv_stride": [8, 8, 8],
            "decoder_attention_heads": 4,
            "decoder_ffn_dim": 96,
            "decoder_layers": 2,
            "decoder_start_token_id": ids["</s>"],
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 96,
            "encoder_layers": 2,
            "eos_token_id": ids["</s>"],
            "hidden_size": 64,
            "max_speech_positions": 64,
            "num_conv_pos_embedding_groups": 4,
            "num_conv_pos_embeddings": 8,
            "pad_token_id": ids["<pad>"],
            "vocab_size": tiny.VOCAB,
        },
        lambda tokenizer: transformers.SpeechT5Processor(transformers.SpeechT5FeatureExtractor(), tokenizer),
        audio="</s>",
        most=1,
        room=256,
        start="</s>",
    ),
    "canary": Recipe(
        ("<|startofcontext|>",),
        lambda ids: {
            "decoder_config": {
                "head_dim": 16,
                "hidden_size": 64,
                "intermediate_size": 96,
                "num_attention_heads": 4,
                "num_hidden_layers": 2,
                "num_key_value_heads": 4,
                "vocab_size": tiny.VOCAB,
            },
            "decoder_start_token_id": ids["<|startofcontext|>"],
            "encoder_config": {"model_type": "parakeet_encoder", "scale_input": False, **_CONFORMER, "hidden_size": 64},
            "vocab_size": tiny.VOCAB,
        },
        lambda tokenizer: transformers.CanaryProcessor(
            transformers.ParakeetFeatureExtractor(feature_size=_BINS), tokenizer
        ),
        audio="<|startofcontext|>",
        most=1,
        start="<|startofcontext|>",
    ),
    "cohere_asr": Recipe(
        ("<|startofcontext|>",),
        lambda ids: {
            "decoder_start_token_id": ids["<|startofcontext|>"],
            "encoder_config": {"model_type": "parakeet_encoder", "scale_input": False, **_CONFORMER},
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_attention_heads": 4,
            "num_hidden_layers": 2,
            "vocab_size": tiny.VOCAB,
        },
        lambda tokenizer: transformers.CohereAsrProcessor(
            transformers.CohereAsrFeatureExtractor(dither=0.0, feature_size=_BINS), tokenizer
        ),
        audio="<|startofcontext|>",
        most=1,
        start="<|startofcontext|>",
    ),
    "speech_to_text": Recipe(
        ("</s>",),
        lambda ids: {
            "conv_channels": 32,
            "d_model": 64,
            "decoder_attention_heads": 4,
            "decoder_ffn_dim": 96,
            "decoder_layers": 2,
            "decoder_start_token_id": ids["</s>"],
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 96,
            "encoder_layers": 2,
            "eos_token_id": ids["</s>"],
            "input_feat_per_channel": _BINS,
            "max_source_positions": 1200,
            "pad_token_id": 1,
            "vocab_size": tiny.VOCAB,
        },
        lambda tokenizer: transformers.Speech2TextProcessor(
            transformers.Speech2TextFeatureExtractor(feature_size=_BINS, num_mel_bins=_BINS), tokenizer
        ),
        audio="</s>",
        most=1,
        start="</s>",
    ),
}
