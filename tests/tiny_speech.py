"""Small random checkpoints of models that only transcribe: an encoder for audio, a decoder for text.

Each is laid out as the checkpoint that its function names; see tiny.py for what they have in common. They stand apart
from the families of tiny.TINY, because a prompt of theirs always has one audio and hardly any text.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from tests import tiny
from tests import tiny_text as text
from tests.tiny_media import FORMS, QWEN_TURN, SOUND_MARKERS
from tests.tiny_more import qwen_tokens
from tests.tiny_sound import EARS, WINDOW_S, whisper_features

SEEDS: dict[str, int] = {"whisper": 1, "qwen3_asr": 1, "glmasr": 1, "audioflamingo3": 1}

LANGUAGES = ("en", "zh", "de", "es", "ru", "ko", "fr", "ja", "pt", "tr")
WHISPER_CONTROL = (
    "<|endoftext|>",
    "<|startoftranscript|>",
    *(f"<|{code}|>" for code in LANGUAGES),
    *("<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"),
)
WHISPER_STAMPS = tuple(f"<|{number / 50:.2f}|>" for number in range(50 * WINDOW_S + 1))
"""A timestamp every 20 ms of the window, as the real checkpoints have them up to 30.00."""


def make_whisper(path: Path) -> None:
    """As openai/whisper-large-v3-turbo: fewer layers in the decoder; windows of two seconds, not thirty."""
    ids = _whisper_tokens(path)
    end, start = ids["<|endoftext|>"], ids["<|startoftranscript|>"]
    config = {
        "activation_dropout": 0.0,
        "activation_function": "gelu",
        "apply_spec_augment": False,
        "architectures": ["WhisperForConditionalGeneration"],
        "attention_dropout": 0.0,
        "begin_suppress_tokens": [ids["Ġ"], end],
        "bos_token_id": end,
        "d_model": 64,
        "decoder_attention_heads": 4,
        "decoder_ffn_dim": 96,
        "decoder_layerdrop": 0.0,
        "decoder_layers": 2,
        "decoder_start_token_id": start,
        "dropout": 0.0,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 96,
        "encoder_layerdrop": 0.0,
        "encoder_layers": 3,
        "eos_token_id": end,
        "init_std": 0.02,
        "is_encoder_decoder": True,
        "max_source_positions": 50 * WINDOW_S,
        "max_target_positions": 96,
        "model_type": "whisper",
        "num_hidden_layers": 3,
        "num_mel_bins": 16,
        "pad_token_id": end,
        "scale_embedding": False,
        "torch_dtype": "float16",
        "use_cache": True,
        "vocab_size": len(ids),
    }
    control = ("<|startoftranscript|>", "<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>")
    generation = {
        "alignment_heads": [[1, 0], [1, 2]],
        "begin_suppress_tokens": [ids["Ġ"], end],
        "bos_token_id": end,
        "decoder_start_token_id": start,
        "eos_token_id": end,
        "is_multilingual": True,
        "lang_to_id": {f"<|{code}|>": ids[f"<|{code}|>"] for code in LANGUAGES},
        "max_initial_timestamp_index": 25,
        "max_length": 96,
        "no_timestamps_token_id": ids["<|notimestamps|>"],
        "pad_token_id": end,
        "prev_sot_token_id": ids["<|startofprev|>"],
        "return_timestamps": False,
        "suppress_tokens": [*range(1, 12), *(ids[token] for token in (*control, "<|nospeech|>"))],
        "task_to_id": {task: ids[f"<|{task}|>"] for task in ("transcribe", "translate")},
    }
    text.write_json(
        path / "preprocessor_config.json", whisper_features("WhisperProcessor", return_attention_mask=False)
    )

    def clear(model: Any) -> None:
        """Answers depend on what is heard, change from place to place, and end now and then."""
        decoder = model.model.decoder
        # Tied embeddings would repeat their tokens.
        decoder.embed_tokens.weight *= 0.5
        decoder.embed_tokens.weight[end] *= 3
        decoder.embed_tokens.weight[ids[WHISPER_STAMPS[0]] :] *= 1.3
        decoder.embed_positions.weight *= 2
        for layer in decoder.layers:
            layer.encoder_attn.q_proj.weight *= 3
            layer.encoder_attn.out_proj.weight *= 1.5
        decoder.layer_norm.weight *= 5

    kept = ("<|endoftext|>", *(f"<|{code}|>" for code in LANGUAGES), *WHISPER_STAMPS)
    tiny._write_model(path, config, generation, ids, seed=SEEDS["whisper"], keep=kept, adjust=clear)


def _whisper_tokens(path: Path) -> dict[str, int]:
    """Byte-level BPE without special tokens, then control tokens, then timestamps, which are no special tokens."""
    draft = Tokenizer(models.BPE())
    draft.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=256 + 150, initial_alphabet=alphabet, show_progress=False)
    draft.train_from_iterator(text.CORPUS, trainer)
    vocab, merges = text._trained(draft)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, fuse_unk=False, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in WHISPER_CONTROL])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in WHISPER_STAMPS])
    ids = tokenizer.get_vocab(with_added_tokens=True)
    around = ("<|startoftranscript|>", "<|notimestamps|>", "<|endoftext|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{around[0]} {around[1]} $A {around[2]}",
        pair=f"{around[0]} {around[1]} $A $B {around[2]}",
        special_tokens=[(token, ids[token]) for token in around],
    )
    tokenizer.save(str(path / "tokenizer.json"))
    plain = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    added = {
        str(ids[token]): {"content": token, **plain, "special": token in WHISPER_CONTROL}
        for token in (*WHISPER_CONTROL, *WHISPER_STAMPS)
    }
    settings = {
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "additional_special_tokens": list(WHISPER_CONTROL),
        "bos_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": True,
        "eos_token": "<|endoftext|>",
        "errors": "replace",
        "model_max_length": 1024,
        "pad_token": "<|endoftext|>",
        "processor_class": "WhisperProcessor",
        "return_attention_mask": False,
        "tokenizer_class": "WhisperTokenizer",
        "unk_token": "<|endoftext|>",
    }
    text.write_json(path / "tokenizer_config.json", settings)
    text.write_json(path / "vocab.json", vocab)
    text.write_json(path / "normalizer.json", {"colour": "color"})
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges)]
    (path / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return ids


QWEN3_ASR_TOKENS = {
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
    "audio_token": "<|audio_pad|>",
}
QWEN3_ASR_CHAT = """{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for content in message['content'] -%}
{%- if content['type'] == 'audio' or 'audio' in content or 'audio_url' in content -%}
{{- '<|audio_start|><|audio_pad|><|audio_end|>' -}}
{%- elif 'text' in content -%}
{{- content['text'] -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""


def make_qwen3_asr(path: Path) -> None:
    """As Qwen/Qwen3-ASR-1.7B-hf: an encoder in windows before Qwen3, and a token between language and words."""
    marks = (*QWEN3_ASR_TOKENS.values(), "<asr_text>")
    ids = qwen_tokens(path, "Qwen3ASRProcessor", marks, QWEN3_ASR_TOKENS | {"chat_template": QWEN3_ASR_CHAT})
    ears = {name: value for name, value in EARS.items() if name not in ("encoder_layerdrop", "max_source_positions")}
    windows = {"downsample_hidden_size": 8, "n_window": 50, "n_window_infer": 200, "output_dim": 64}
    config = {
        "architectures": ["Qwen3ASRForConditionalGeneration"],
        "audio_config": ears | windows | {"max_position_embeddings": 13, "model_type": "qwen3_asr_encoder"},
        "audio_token_id": ids["<|audio_pad|>"],
        "eos_token_id": [ids["<|endoftext|>"], ids["<|im_end|>"]],
        "model_type": "qwen3_asr",
        "pad_token_id": ids["<|im_end|>"],
        "text_config": tiny.LLAMA_SHAPE
        | {
            "head_dim": 16,
            "max_position_embeddings": 4096,
            "model_type": "qwen3",
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000,
            "tie_word_embeddings": True,
        },
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
    features = {"feature_extractor_type": "Qwen3ASRFeatureExtractor", "min_length": 8000, "n_window": 50}
    text.write_json(path / "preprocessor_config.json", whisper_features("Qwen3ASRProcessor", **features))
    tiny._write_model(path, config, tiny._qwen_generation(ids), ids, seed=SEEDS["qwen3_asr"], keep=("<|im_end|>",))


GLM_MARKS = (
    "<|endoftext|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<|begin_of_audio|>",
    "<|end_of_audio|>",
)
GLM_ASR_CHAT = """{%- for message in messages -%}
{{- '<|' + message['role'] + '|>\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for content in message['content'] -%}
{%- if content['type'] == 'audio' or 'audio' in content or 'audio_url' in content -%}
{{- '<|begin_of_audio|><|pad|><|end_of_audio|><|user|>\\n' -}}
{%- elif 'text' in content -%}
{{- content['text'] -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}"""


def make_glmasr(path: Path) -> None:
    """As zai-org/GLM-ASR-Nano-2512: an encoder with rotary positions, four of whose states make an embedding."""
    (path / "chat_template.jinja").write_text(GLM_ASR_CHAT, encoding="utf-8")
    settings = {
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|endoftext|>",
        "model_max_length": 8192,
        "pad_token": "<|endoftext|>",
        "processor_class": "GlmAsrProcessor",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    ids = text.write_llama3_tokenizer(path, GLM_MARKS, "<|pad|>", tiny.VOCAB - 1, settings)
    ends = [ids["<|endoftext|>"], ids["<|user|>"], ids["<|observation|>"]]
    config = {
        "architectures": ["GlmAsrForConditionalGeneration"],
        "audio_config": {
            "hidden_act": "gelu",
            "hidden_size": 32,
            "intermediate_size": 128,
            "max_position_embeddings": 50 * WINDOW_S,
            "model_type": "glmasr_encoder",
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
            "num_mel_bins": 16,
            "partial_rotary_factor": 0.5,
            "rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 10000.0, "rope_type": "default"},
        },
        "audio_token_id": ids["<|pad|>"],
        "model_type": "glmasr",
        "projector_hidden_act": "gelu",
        "text_config": tiny.LLAMA_SHAPE
        | {"eos_token_id": ends, "max_position_embeddings": 4096, "model_type": "llama", "rms_norm_eps": 1e-5},
        "torch_dtype": "bfloat16",
    }
    text.write_json(path / "preprocessor_config.json", whisper_features("GlmAsrProcessor"))
    text.write_json(
        path / "processor_config.json",
        {
            "audio_token": "<|pad|>",
            "default_transcription_prompt": "Please transcribe this audio into text",
            "feature_extractor": whisper_features("GlmAsrProcessor"),
            "max_audio_len": 655,
            "processor_class": "GlmAsrProcessor",
        },
    )
    generation = {"eos_token_id": ends, "pad_token_id": ids["<|endoftext|>"]}
    tiny._write_model(path, config, generation, ids, seed=SEEDS["glmasr"], keep=("<|endoftext|>",))


def make_audioflamingo3(path: Path) -> None:
    """As nvidia/audio-flamingo-3-hf: Whisper's encoder, halved by pooling, before Qwen2; a text follows its audio."""
    form = QWEN3_ASR_CHAT.replace("<|audio_start|><|audio_pad|><|audio_end|>", "<sound>")
    ids = qwen_tokens(path, "AudioFlamingo3Processor", ("<sound>",), {"chat_template": form})
    config = {
        "architectures": ["AudioFlamingo3ForConditionalGeneration"],
        "audio_config": {
            "activation_function": "gelu",
            "hidden_size": 32,
            "intermediate_size": 64,
            "max_source_positions": 50 * WINDOW_S,
            "model_type": "audioflamingo3_encoder",
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
            "num_mel_bins": 16,
        },
        "audio_token_id": ids["<sound>"],
        "model_type": "audioflamingo3",
        "projector_bias": True,
        "projector_hidden_act": "gelu",
        "text_config": tiny.LLAMA_SHAPE
        | {
            "eos_token_id": ids["<|im_end|>"],
            "max_position_embeddings": 4096,
            "model_type": "qwen2",
            "rms_norm_eps": 1e-6,
            "use_sliding_window": False,
        },
        "torch_dtype": "bfloat16",
    }
    features = whisper_features("AudioFlamingo3Processor")
    text.write_json(path / "preprocessor_config.json", features)
    parts = {"audio_token": "<sound>", "feature_extractor": features, "max_audio_len": 600}
    text.write_json(path / "processor_config.json", parts | {"processor_class": "AudioFlamingo3Processor"})
    generation = tiny._qwen_generation(ids)
    tiny._write_model(path, config, generation, ids, seed=SEEDS["audioflamingo3"], keep=("<|im_end|>",))


TINY: dict[str, Callable[[Path], None]] = {
    "audioflamingo3": make_audioflamingo3,
    "whisper": make_whisper,
    "qwen3_asr": make_qwen3_asr,
    "glmasr": make_glmasr,
}
FORMS["qwen3_asr"] = QWEN_TURN
FORMS["audioflamingo3"] = QWEN_TURN
SOUND_MARKERS["audioflamingo3"] = "<sound>"
FORMS["glmasr"] = "<|user|>\n{}<|assistant|>\n"
SOUND_MARKERS["glmasr"] = "<|begin_of_audio|><|pad|><|end_of_audio|>"
SOUND_MARKERS["qwen3_asr"] = "<|audio_start|><|audio_pad|><|audio_end|>"
