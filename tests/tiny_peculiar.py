"""Small random checkpoints of families with peculiar decoders or ways in for pictures.

Each is laid out as the checkpoint that its function names; see tiny.py for what they have in common.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from tests import tiny
from tests import tiny_text as text
from tests.tiny_media import FORMS, MARKERS
from tests.tiny_more import pixels

SEEDS: dict[str, int] = {"blip2": 2}
"""Family -> the seed of its weights; chosen so that greedy choices are clear (see oracle/test_tiny.py)."""


def opt_tokens(path: Path, extra: tuple[str, ...]) -> dict[str, int]:
    """Byte-level BPE as OPT has it: one token starts and ends every text; `extra` tokens at the end."""
    specials = ("<s>", "<pad>", "</s>", "<unk>")
    draft = Tokenizer(models.BPE())
    draft.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=256 + 160, initial_alphabet=alphabet, special_tokens=list(specials), show_progress=False
    )
    draft.train_from_iterator(text.CORPUS, trainer)
    vocab, merges = text._trained(draft)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, fuse_unk=False, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="</s> $A", pair="</s> $A </s> $B", special_tokens=[("</s>", vocab["</s>"])]
    )
    tokenizer.decoder = decoders.ByteLevel()
    settings = {
        "add_bos_token": True,
        "add_prefix_space": False,
        "bos_token": "</s>",
        "clean_up_tokenization_spaces": True,
        "eos_token": "</s>",
        "errors": "replace",
        "model_max_length": 1000000000000000019884624838656,
        "pad_token": "<pad>",
        "processor_class": "Blip2Processor",
        "tokenizer_class": "GPT2Tokenizer",
        "unk_token": "</s>",
    }
    text._finish(path, tokenizer, ("<pad>", "</s>", *extra), settings)
    text.write_json(path / "vocab.json", vocab)
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges)]
    (path / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return tokenizer.get_vocab(with_added_tokens=True)


def make_blip2(path: Path) -> None:
    """As Salesforce/blip2-opt-2.7b: queries that ask the picture, before a language model with learned positions."""
    ids = opt_tokens(path, ("<image>",))
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


TINY: dict[str, Callable[[Path], None]] = {"blip2": make_blip2}
IMAGE_FAMILIES = tuple(TINY)
VIDEO_FAMILIES: tuple[str, ...] = ()
LONE_FAMILIES = ("blip2",)
CHATLESS_FAMILIES = ("blip2",)
FORMS.update({"blip2": "Question: {} Answer:"})
MARKERS.update({"blip2": ("", "")})
