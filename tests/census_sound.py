"""Recipes of types that only hear; see census_media.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import torch
import transformers

from beheld.families.voxtral_realtime import inputs as voxtral_realtime
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


def _seamless() -> Recipe:
    return Recipe(
        ("</s>",),
        lambda ids: {
            "bos_token_id": ids["</s>"],
            "decoder_attention_heads": 4,
            "decoder_ffn_dim": 96,
            "decoder_layers": 2,
            "decoder_start_token_id": ids["</s>"],
            "eos_token_id": ids["</s>"],
            "feature_projection_input_dim": 2 * _BINS,
            "hidden_size": 64,
            "max_position_embeddings": 1024,
            "speech_encoder_attention_heads": 4,
            "speech_encoder_intermediate_size": 96,
            "speech_encoder_layers": 2,
            "vocab_size": tiny.VOCAB,
        },
        lambda tokenizer: transformers.SeamlessM4TProcessor(
            transformers.SeamlessM4TFeatureExtractor(feature_size=_BINS, num_mel_bins=_BINS), tokenizer
        ),
        audio="</s>",
        most=1,
        start="</s>",
    )


def _codebooks(model: Any) -> None:
    """Give a codec's books codes that differ; they are kept as sums."""
    for name, table in model.codec_model.named_buffers():
        if name.endswith("embed_sum"):
            table.copy_(6 * torch.randn_like(table))


def _kyutai_asked(processor: Any, words: str, sounds: Any) -> tuple[dict[str, Any], Callable[[], list[int]]]:
    """As Kyutai's speech to text is asked: samples, and the tokens that the answer continues."""
    made = processor.feature_extractor(list(sounds), return_tensors="pt", sampling_rate=24000)
    ids = processor.tokenizer([words], add_special_tokens=False, return_tensors="pt")["input_ids"]
    return {"input_values": made["input_values"], "input_ids": ids}, lambda: ids[0].tolist()


class _Saved:
    """The parts of a processor that needs mistral-common."""

    def __init__(self, *parts: Any) -> None:
        self._parts = parts

    def save_pretrained(self, folder: Any) -> None:
        """Write the files of each part."""
        for part in self._parts:
            part.save_pretrained(folder)


def _voxtral_asked(processor: Any, words: str, sounds: Any) -> tuple[dict[str, Any], Callable[[], list[int]]]:
    """As Voxtral Realtime is asked of a whole recording: 32 tokens of silence, the audio, and 17 tokens of silence."""
    token = 1280
    (samples,) = (numpy.pad(each, (32 * token, -len(each) % token + 17 * token)) for each in sounds)
    features = processor.feature_extractor(samples, sampling_rate=16000, return_tensors="pt")["input_features"]
    start = "<s>" + "[STREAMING_PAD]" * 38
    ids = processor.tokenizer([start + words.removeprefix("<s>")], add_special_tokens=False, return_tensors="pt")
    inputs = {"input_features": features, "input_ids": ids["input_ids"], "num_delay_tokens": 6}
    return inputs, lambda: ids["input_ids"][0].tolist()


_FRAMES = {"conv_kernel": [10, 8, 8], "conv_stride": [8, 8, 8]}

RECIPES: dict[str, Recipe] = {
    "omniasr": Recipe(
        ("<extra_id_0>", "<extra_id_1>"),
        lambda ids: {
            "audio_config": {
                "model_type": "omniasr_audio",
                "conv_dim": [32] * 3,
                **_FRAMES,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_attention_heads": 2,
                "num_conv_pos_embedding_groups": 4,
                "num_conv_pos_embeddings": 8,
                "num_hidden_layers": 2,
            },
            "audio_token_id": ids["<extra_id_1>"],
            "text_config": {"model_type": "llama", **LANGUAGE},
        },
        lambda tokenizer: transformers.OmniASRProcessor(transformers.OmniASRFeatureExtractor(), tokenizer, **_FRAMES),
        audio="<extra_id_1>",
        # Its processor takes as many texts as sounds.
        most=1,
    ),
    "voxtral_realtime": Recipe(
        ("<s>", "[STREAMING_PAD]"),
        lambda ids: {
            "audio_config": {
                "model_type": "voxtral_realtime_encoder",
                "head_dim": 16,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_attention_heads": 2,
                "num_hidden_layers": 2,
                "num_mel_bins": _BINS,
                "sliding_window": 20,
            },
            "text_config": {
                "model_type": "voxtral_realtime_text",
                "bos_token_id": ids["<s>"],
                "sliding_window": 40,
                **LANGUAGE,
            },
        },
        lambda tokenizer: _Saved(transformers.VoxtralRealtimeFeatureExtractor(feature_size=_BINS), tokenizer),
        named={"bos_token": "<s>"},
        audio="<s>",
        most=1,
        placed=True,
        start="<s>",
        asked=_voxtral_asked,
        load=voxtral_realtime.load,
    ),
    "nemo_speechlm": Recipe(
        ("<|audio|>",),
        lambda ids: {
            "audio_config": {
                "asr_config": {
                    "hidden_size": 32,
                    "intermediate_size": 48,
                    "num_attention_heads": 2,
                    "num_hidden_layers": 2,
                    "num_mel_bins": _BINS,
                },
                "diarization_config": {
                    "model_type": "nemotron3_diarization",
                    "audio_config": {
                        "hidden_size": 32,
                        "intermediate_size": 48,
                        "num_attention_heads": 2,
                        "num_hidden_layers": 2,
                        "num_mel_bins": _BINS,
                    },
                    "chunk_left_context": 4,
                    "chunk_length": 20,
                    "chunk_right_context": 4,
                    "head_config": {"audio_hidden_size": 32, "hidden_size": 16},
                },
            },
            "audio_token_id": ids["<|audio|>"],
            "text_config": {
                "model_type": "nemotron_h",
                "head_dim": 16,
                "hidden_size": 64,
                "layers_block_type": ["mamba", "attention", "moe", "mlp"],
                "mamba_head_dim": 16,
                "mamba_num_heads": 8,
                "moe_shared_expert_intermediate_size": 32,
                "n_groups": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "ssm_state_size": 16,
                # The audio's token has no row in the table.
                "vocab_size": ids["<|audio|>"],
            },
            "word_timestamp_config": {
                "blank_token_id": tiny.VOCAB - 1,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_attention_heads": 2,
                "num_hidden_layers": 1,
            },
        },
        lambda tokenizer: transformers.Nemotron3_5TranscribeProcessor(
            transformers.ParakeetFeatureExtractor(feature_size=_BINS), tokenizer, tokenizer
        ),
        audio="<|audio|>",
        # Its processor takes as many texts as sounds.
        most=1,
    ),
    "seamless_m4t": _seamless(),
    "seamless_m4t_v2": _seamless(),
    "kyutai_speech_to_text": Recipe(
        ("<s>",),
        lambda ids: {
            "audio_bos_token_id": 32,
            "audio_pad_token_id": tiny.VOCAB + 4 * 33,
            "bos_token_id": ids["<s>"],
            "codebook_vocab_size": 33,
            "codec_config": {
                "model_type": "mimi",
                "codebook_dim": 16,
                "codebook_size": 32,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_attention_heads": 2,
                "num_filters": 2,
                "num_hidden_layers": 2,
                "num_key_value_heads": 2,
                "num_quantizers": 4,
                "upsample_groups": 32,
                "vector_quantization_hidden_dimension": 16,
            },
            "ffn_dim": 96,
            "hidden_size": 64,
            "max_position_embeddings": 200,
            "num_attention_heads": 4,
            "num_codebooks": 4,
            "num_hidden_layers": 2,
            # The window is shorter than an answer.
            "sliding_window": 6,
            "vocab_size": tiny.VOCAB,
        },
        lambda tokenizer: transformers.KyutaiSpeechToTextProcessor(
            transformers.KyutaiSpeechToTextFeatureExtractor(audio_delay_seconds=0.5, audio_silence_prefix_seconds=0.1),
            tokenizer,
        ),
        audio="<s>",
        rate=24000,
        most=1,
        room=200,
        placed=True,
        start="<s>",
        asked=_kyutai_asked,
        settle=_codebooks,
    ),
    "moonshine_streaming": Recipe(
        ("<s>",),
        lambda ids: {
            "bos_token_id": ids["<s>"],
            "decoder_start_token_id": ids["<s>"],
            "encoder_config": {
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_attention_heads": 2,
                "num_hidden_layers": 2,
                "num_key_value_heads": 2,
                "sliding_windows": [[16, 4], [16, 0]],
            },
            "hidden_size": 64,
            "intermediate_size": 96,
            "max_position_embeddings": 1024,
            "num_attention_heads": 4,
            "num_hidden_layers": 2,
            "num_key_value_heads": 4,
            "vocab_size": tiny.VOCAB,
        },
        lambda tokenizer: transformers.MoonshineStreamingProcessor(
            transformers.Wav2Vec2FeatureExtractor(do_normalize=False, return_attention_mask=True), tokenizer
        ),
        audio="<s>",
        most=1,
        start="<s>",
    ),
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
