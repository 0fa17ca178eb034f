"""Small random checkpoints of families with peculiar decoders or ways in for pictures.

Each is laid out as the checkpoint that its function names; see tiny.py for what they have in common.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests import tiny
from tests import tiny_text as text
from tests.tiny_media import FORMS, MARKERS
from tests.tiny_more import SIGLIP, language, pixels

SEEDS: dict[str, int] = {"blip2": 2, "chameleon": 1, "fuyu": 6, "mantis": 1}
"""Family -> the seed of its weights; chosen so that greedy choices are clear (see oracle/test_tiny.py)."""


def byte_tokens(
    path: Path, first: tuple[str, ...], extra: tuple[str, ...], start: str, settings: dict[str, Any]
) -> dict[str, int]:
    """Byte-level BPE: the special tokens `first`, letters and words, then `extra`; texts start with `start`."""
    draft = Tokenizer(models.BPE())
    draft.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=256 + 150, initial_alphabet=alphabet, special_tokens=list(first), show_progress=False
    )
    draft.train_from_iterator(text.CORPUS, trainer)
    vocab, merges = text._trained(draft)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, fuse_unk=False, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{start} $A", pair=f"{start} $A {start} $B", special_tokens=[(start, vocab[start])]
    )
    tokenizer.decoder = decoders.ByteLevel()
    common = {"bos_token": start, "clean_up_tokenization_spaces": False, "model_max_length": 4096}
    text._finish(path, tokenizer, (*first, *extra), common | settings)
    text.write_json(path / "vocab.json", vocab)
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges)]
    (path / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return tokenizer.get_vocab(with_added_tokens=True)


def make_blip2(path: Path) -> None:
    """As Salesforce/blip2-opt-2.7b: queries that ask the picture, before a language model with learned positions."""
    settings = {
        "add_bos_token": True,
        "add_prefix_space": False,
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "processor_class": "Blip2Processor",
        "tokenizer_class": "GPT2Tokenizer",
        "unk_token": "</s>",
    }
    ids = byte_tokens(path, ("<s>", "<pad>", "</s>", "<unk>"), ("<image>",), "</s>", settings)
    config = {
        "architectures": ["Blip2ForConditionalGeneration"],
        "image_text_hidden_size": 32,
        "image_token_index": ids["<image>"],
        "initializer_factor": 1.0,
        "initializer_range": 0.02,
        "model_type": "blip-2",
        "num_query_tokens": 20,
        "qformer_config": {
            "cross_attention_frequency": 2,
            "encoder_hidden_size": 32,
            "hidden_size": 48,
            "intermediate_size": 64,
            "model_type": "blip_2_qformer",
            "num_attention_heads": 4,
            "num_hidden_layers": 3,
            "vocab_size": 64,
        },
        "text_config": {
            "_remove_final_layer_norm": False,
            "activation_function": "relu",
            "architectures": ["OPTForCausalLM"],
            "do_layer_norm_before": True,
            "eos_token_id": ids["</s>"],
            "ffn_dim": 96,
            "hidden_size": 64,
            "max_position_embeddings": 1024,
            "model_type": "opt",
            "num_attention_heads": 4,
            "num_hidden_layers": 3,
            "prefix": "</s>",
            "torch_dtype": "float16",
            "vocab_size": tiny.VOCAB,
            "word_embed_proj_dim": 64,
        },
        "torch_dtype": "float16",
        "use_decoder_only_language_model": True,
        "vision_config": {
            "hidden_act": "gelu",
            "hidden_size": 32,
            "image_size": 56,
            "intermediate_size": 64,
            "layer_norm_eps": 1e-06,
            "model_type": "blip_2_vision_model",
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
            "patch_size": 14,
            "qkv_bias": True,
        },
    }
    files = pixels("BlipImageProcessor", "Blip2Processor", size={"height": 56, "width": 56})
    text.write_json(path / "preprocessor_config.json", files)
    text.write_json(path / "processor_config.json", {"num_query_tokens": 20, "processor_class": "Blip2Processor"})
    generation = {"bos_token_id": ids["</s>"], "eos_token_id": ids["</s>"], "pad_token_id": ids["<pad>"]}
    tiny._write_model(path, config, generation, ids, seed=SEEDS["blip2"])


CODES = tuple("IMGIMG" + "".join(chr(ord("A") + int(digit)) for digit in str(code)) + "Z" for code in range(64))
"""The tokens of a picture's codes, whose numbers are spelled with A for 0 to J for 9."""


def make_chameleon(path: Path) -> None:
    """As facebook/chameleon-7b: pictures become tokens of a codebook, which answers may not hold."""
    settings = {
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "processor_class": "ChameleonProcessor",
        "sep_token": "<reserved08706>",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
    }
    marks = (*CODES, "<eoss>", "<racm3:break>", "<reserved08706>", "<image>")
    ids = byte_tokens(path, ("<s>", "<pad>", "</s>", "<unk>"), marks, "<s>", settings)
    config = tiny.LLAMA_SHAPE | {
        "architectures": ["ChameleonForConditionalGeneration"],
        "attention_bias": False,
        "bos_token_id": ids["<s>"],
        "eos_token_id": ids["</s>"],
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "mlp_bias": False,
        "model_parallel_size": 1,
        "model_type": "chameleon",
        "num_key_value_heads": 4,
        "pad_token_id": ids["<pad>"],
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "swin_norm": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocabulary_map": ids,
        "vq_config": {
            "attn_type": "vanilla",
            "base_channels": 32,
            "channel_multiplier": [1, 1, 1, 1],
            "double_latent": False,
            "embed_dim": 8,
            "in_channels": 3,
            "latent_channels": 8,
            "model_type": "chameleon_vqgan",
            "num_embeddings": len(CODES),
            "num_res_blocks": 1,
            "resolution": 32,
        },
    }
    size = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}, "do_center_crop": True}
    ones = {"image_mean": [1.0, 1.0, 1.0], "image_std": [1.0, 1.0, 1.0], "rescale_factor": 0.0078, "resample": 1}
    files = pixels("ChameleonImageProcessor", "ChameleonProcessor", **size) | ones
    text.write_json(path / "preprocessor_config.json", files)
    owner = {"image_seq_length": 16, "image_token": "<image>", "processor_class": "ChameleonProcessor"}
    text.write_json(path / "processor_config.json", owner)

    def loud_codes(model: Any) -> None:
        # Codes would win often if the head did not bar them.
        model.get_output_embeddings().weight[[ids[code] for code in CODES]] *= 20

    seed = SEEDS["chameleon"]
    tiny._write_model(path, config, tiny._llama_generation(ids), ids, seed=seed, adjust=loud_codes)


def fuyu_tokens(path: Path) -> dict[str, int]:
    """A unigram vocabulary as Fuyu has it: its marks are ordinary pieces, and every text starts with a blank."""
    marks = ("<unk>", "<s>", "</s>", "|ENDOFTEXT|")
    pieces = (*marks[1:], "|SPEAKER|", "|NEWLINE|", *(f"<0x{byte:02X}>" for byte in range(256)))
    draft = Tokenizer(models.Unigram())
    draft.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.UnigramTrainer(vocab_size=220, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False)
    draft.train_from_iterator(text.CORPUS[:-1], trainer)
    words = [(piece, score) for piece, score in json.loads(draft.to_str())["model"]["vocab"] if piece != "<unk>"]
    # Of the pieces with a name of their own, one costs less than any way to spell it.
    vocab = [("<unk>", 0.0), *((piece, 0.0) for piece in pieces), *words]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    tokenizer.normalizer = draft.normalizer
    start = "|ENDOFTEXT|"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{start} $A", pair=f"{start} $A {start} $B", special_tokens=[(start, tokenizer.token_to_id(start))]
    )
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    settings = {
        "add_bos_token": True,
        "bos_token": start,
        "clean_up_tokenization_spaces": False,
        "eos_token": start,
        "model_max_length": 4096,
        "processor_class": "FuyuProcessor",
        "tokenizer_class": "LlamaTokenizer",
        "unk_token": "<unk>",
    }
    text._finish(path, tokenizer, ("<unk>", start), settings)
    return tokenizer.get_vocab(with_added_tokens=True)


def make_fuyu(path: Path) -> None:
    """As adept/fuyu-8b: patches of a picture in rows, without a tower; a flat configuration."""
    ids = fuyu_tokens(path)
    config = {
        "architectures": ["FuyuForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "relu2",
        "hidden_dropout": 0.0,
        "hidden_size": 64,
        "image_size": 28,
        "image_token_id": ids["|SPEAKER|"],
        "initializer_range": 0.02,
        "intermediate_size": 128,
        "layer_norm_eps": 1e-05,
        "max_position_embeddings": 4096,
        "model_type": "fuyu",
        "num_attention_heads": 4,
        "num_channels": 3,
        "num_hidden_layers": 3,
        "patch_size": 14,
        "qk_layernorm": True,
        "rope_scaling": None,
        "rope_theta": 25000.0,
        "text_model_type": "persimmon",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": tiny.VOCAB,
    }
    files = pixels("FuyuImageProcessor", "FuyuProcessor", size={"height": 112, "width": 140}, image_mean=0.5)
    files |= {"do_pad": True, "image_std": 0.5, "padding_mode": "constant", "padding_value": 1.0, "resample": 2}
    files["patch_size"] = {"height": 14, "width": 14}
    text.write_json(path / "preprocessor_config.json", files)

    def quiet_marks(model: Any) -> None:
        # Pictures' marks are ordinary pieces to the tokenizer, yet mean nothing in an answer.
        model.get_output_embeddings().weight[[ids["|SPEAKER|"], ids["|NEWLINE|"]]] *= 0.05

    generation = {"bos_token_id": 1, "eos_token_id": 2}
    tiny._write_model(path, config, generation, ids, seed=SEEDS["fuyu"], keep=("|ENDOFTEXT|",), adjust=quiet_marks)


LLAMA3_CHAT = """{%- for message in messages -%}
{%- if loop.first -%}{{- bos_token -}}{%- endif -%}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}{%- endif -%}"""


def make_mantis(path: Path) -> None:
    """As TIGER-Lab/Mantis-8B-siglip-llama3: LLaVA's class, and a processor that transformers does not know."""
    marks = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    settings = {
        "chat_template": LLAMA3_CHAT,
        "eos_token": "<|end_of_text|>",
        "model_input_names": ["input_ids", "attention_mask"],
        "processor_class": "MLlavaProcessor",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    ids = byte_tokens(path, marks, ("<image>", "<|pad|>"), "<|begin_of_text|>", settings)
    config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "ignore_index": -100,
        "image_token_index": ids["<image>"],
        "model_type": "llava",
        "pad_token_id": ids["<|pad|>"],
        "projector_hidden_act": "gelu",
        "text_config": language("llama", "LlamaForCausalLM", rope_theta=500000.0)
        | {"bos_token_id": ids["<|begin_of_text|>"], "eos_token_id": ids["<|end_of_text|>"]},
        "torch_dtype": "bfloat16",
        "vision_config": {name: value for name, value in SIGLIP.items() if name != "vision_use_head"},
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
    }
    size = {"size": {"height": 56, "width": 56}, "image_mean": tiny.HALF, "image_std": tiny.HALF}
    text.write_json(path / "preprocessor_config.json", pixels("SiglipImageProcessor", "MLlavaProcessor", **size))
    generation = {"bos_token_id": ids["<|begin_of_text|>"], "eos_token_id": ids["<|end_of_text|>"]}
    seed = SEEDS["mantis"]
    tiny._write_model(path, config, generation, ids, seed=seed, keep=("<|end_of_text|>", "<|eot_id|>"))


TINY: dict[str, Callable[[Path], None]] = {
    "blip2": make_blip2,
    "chameleon": make_chameleon,
    "fuyu": make_fuyu,
    "mantis": make_mantis,
}
IMAGE_FAMILIES = tuple(TINY)
VIDEO_FAMILIES: tuple[str, ...] = ()
LONE_FAMILIES = ("blip2", "fuyu")
CHATLESS_FAMILIES = ("blip2", "chameleon", "fuyu", "mantis")
LLAMA3_TURN = (
    "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
)
FORMS.update({"blip2": "Question: {} Answer:", "chameleon": "{}", "fuyu": "{}\n", "mantis": LLAMA3_TURN})
MARKERS.update({"blip2": ("", ""), "chameleon": ("<image>", ""), "fuyu": ("", ""), "mantis": ("<image>", "")})
