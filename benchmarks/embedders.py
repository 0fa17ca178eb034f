"""Checkpoints of embedders for benchmarks: real sizes, random weights, a tokenizer of a few words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.pool.checkpoints import modules, write

_NOUNS = ("cat", "dog", "river", "mountain", "music", "circle", "square", "chair", "left")
WORDS = (*_NOUNS, "the", "a", "sleeps", "stands", "sees", "small", "large", "red", "blue", "of", "and")
_BERT = {
    "attention_probs_dropout_prob": 0.0,
    "hidden_dropout_prob": 0.0,
    "max_position_embeddings": 512,
    "num_attention_heads": 12,
    "vocab_size": 30_522,
}
_SHAPES: dict[str, tuple[str, dict[str, Any], str]] = {
    "minilm": ("Bert", _BERT | {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6}, "mean_tokens"),
    # An encoder for benchmarks.host: vectors of MiniLM's width, next to no layers.
    "host": ("Bert", _BERT | {"hidden_size": 384, "intermediate_size": 64, "num_hidden_layers": 1}, "mean_tokens"),
    "bert-base": (
        "Bert",
        _BERT | {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12},
        "cls_token",
    ),
    "qwen3-0.6b": (
        "Qwen3",
        {
            "head_dim": 128,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "max_position_embeddings": 32_768,
            "num_attention_heads": 16,
            "num_hidden_layers": 28,
            "num_key_value_heads": 8,
            "rope_parameters": {"rope_theta": 1_000_000.0, "rope_type": "default"},
            "tie_word_embeddings": True,
            "vocab_size": 151_669,
        },
        "lasttoken",
    ),
}
SHAPES = tuple(_SHAPES)
"""all-MiniLM-L6-v2, one layer of its width, BERT-base and Qwen3-Embedding-0.6B."""


def make(shape: str, folder: Path, device: str = "cpu") -> Path:
    """Write the checkpoint of a shape, its weights drawn from a seed on `device`."""
    import transformers

    kind, entries, mode = _SHAPES[shape]
    folder.mkdir(parents=True, exist_ok=True)
    config = getattr(transformers, f"{kind}Config")(architectures=[f"{kind}Model"], **entries)
    with torch.random.fork_rng(devices=[0] if device == "cuda" else []), torch.device(device):
        torch.manual_seed(3)
        model = getattr(transformers, f"{kind}Model")._from_config(config, dtype=torch.bfloat16)
    # What transformers draws leaves all texts nearly equal.
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                weight.normal_(0, (1.0 if "embed" in name else 1.5) / weight.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    _write_tokenizer(folder, entries["vocab_size"], encoder=kind == "Bert")
    pooling = {"word_embedding_dimension": entries["hidden_size"], f"pooling_mode_{mode}": True}
    modules(folder, "Pooling", "Normalize", **pooling)
    write(folder / "sentence_bert_config.json", {"do_lower_case": False, "max_seq_length": 512})
    return folder


def _write_tokenizer(folder: Path, size: int, encoder: bool) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    tokens = [*names, *WORDS, *(f"[unused{number}]" for number in range(size - len(names) - len(WORDS)))]
    made = Tokenizer(models.WordPiece({token: number for number, token in enumerate(tokens)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    single = "[CLS] $A [SEP]" if encoder else "$A [SEP]"
    made.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    given = ["input_ids", "attention_mask", *(["token_type_ids"] if encoder else [])]
    PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        eos_token=None if encoder else "[SEP]",
        model_input_names=given,
        padding_side="right" if encoder else "left",
    ).save_pretrained(folder)
