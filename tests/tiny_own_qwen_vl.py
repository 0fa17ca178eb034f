"""Small random checkpoints of Qwen-VL and Qwen-VL-Chat, with a file of tiktoken's for its tokenizer; see tiny.py."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from tests import tiny_text as text
from tests.tiny_media import FORMS, MARKERS
from tests.tiny_own_clip import write_model

SEEDS: dict[str, int] = {"qwen_vl": 3, "qwen_vl_chat": 1}
"""Family -> the seed of its weights; chosen so that greedy choices are clear (see oracle/test_tiny.py)."""

CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EXTRAS = tuple(f"<|extra_{number}|>" for number in range(205))
BOXES = ("<ref>", "</ref>", "<box>", "</box>", "<quad>", "</quad>")
MARKS = ("<img>", "</img>", "<imgpad>")


def make_qwen_vl(path: Path) -> None:
    """As Qwen/Qwen-VL: Qwen-1's configuration with an entry for the tower, qwen.tiktoken, no processor's file."""
    stop = {"chat_format": "raw", "top_p": 0.5}
    _make(path, "qwen_vl", lambda end: stop | {"stop_words_ids": [[end]]})


def make_qwen_vl_chat(path: Path) -> None:
    """As Qwen/Qwen-VL-Chat: the same, and answers in ChatML."""
    _make(path, "qwen_vl_chat", lambda end: {"chat_format": "chatml", "max_window_size": 6144, "top_p": 0.3})


def _make(path: Path, name: str, generates: Callable[[int], dict[str, Any]]) -> None:
    ids = write_tokenizer(path)
    config = {
        "architectures": ["QWenLMHeadModel"],
        "attn_dropout_prob": 0.0,
        "auto_map": {
            "AutoConfig": "configuration_qwen.QWenConfig",
            "AutoModelForCausalLM": "modeling_qwen.QWenLMHeadModel",
        },
        "bf16": True,
        "emb_dropout_prob": 0.0,
        "fp16": False,
        "fp32": False,
        "hidden_size": 256,
        "initializer_range": 0.02,
        "intermediate_size": 384,
        "kv_channels": 64,
        "layer_norm_epsilon": 1e-6,
        "max_position_embeddings": 8192,
        "model_type": "qwen",
        "no_bias": True,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "onnx_safe": None,
        "rotary_emb_base": 10000,
        "rotary_pct": 1.0,
        "scale_attn_weights": True,
        "seq_length": 2048,
        "tie_word_embeddings": False,
        "tokenizer_type": "QWenTokenizer",
        "torch_dtype": "bfloat16",
        "transformers_version": "4.31.0",
        "use_cache": True,
        "use_dynamic_ntk": True,
        "use_flash_attn": False,
        "use_logn_attn": True,
        "visual": {
            "heads": 2,
            # Twenty patches a side: other than the sixteen of the tower's positions, and than the queries' four.
            "image_size": 280,
            "image_start_id": ids["<img>"],
            "layers": 2,
            "mlp_ratio": 4.9231,
            # The published code's default is 256.
            "n_queries": 16,
            "output_dim": 256,
            "patch_size": 14,
            "width": 32,
        },
        "vocab_size": -(-len(ids) // 16) * 16,
    }
    generation = {
        "do_sample": True,
        "eos_token_id": ids["<|endoftext|>"],
        "max_new_tokens": 512,
        "pad_token_id": ids["<|endoftext|>"],
        "top_k": 0,
        "transformers_version": "4.31.0",
    } | generates(ids["<|endoftext|>"])
    quiet = (*CHATML[:2], *EXTRAS, *BOXES, *MARKS)
    write_model(path, config, generation, ids, quiet, seed=SEEDS[name], publish=publish)


def write_tokenizer(path: Path) -> dict[str, int]:
    """Write qwen.tiktoken and tokenizer_config.json; return the ids of all tokens."""
    draft = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(text.QWEN_SPLIT), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    draft.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    draft.train_from_iterator(
        text.CORPUS, trainers.BpeTrainer(vocab_size=256 + 160, initial_alphabet=alphabet, show_progress=False)
    )
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}
    vocab, _ = text._trained(draft)
    lines = [
        f"{base64.b64encode(bytes(byte_of[letter] for letter in token)).decode()} {rank}"
        for token, rank in vocab.items()
    ]
    (path / "qwen.tiktoken").write_text("\n".join(lines) + "\n", encoding="ascii")
    settings = {
        "auto_map": {"AutoTokenizer": ["tokenization_qwen.QWenTokenizer", None]},
        "model_max_length": 8192,
        "tokenizer_class": "QWenTokenizer",
    }
    text.write_json(path / "tokenizer_config.json", settings)
    return vocab | {token: len(vocab) + n for n, token in enumerate((*CHATML, *EXTRAS, *BOXES, *MARKS))}


# Scripts load the tokenizer with transformers, which runs the repository's code; ours stands for it.
_CODE = """
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from beheld.families.qwen_vl.processing import read_tokenizer


class QWenTokenizer(PreTrainedTokenizerFast):
    vocab_files_names = {"vocab_file": "qwen.tiktoken"}

    def __init__(self, vocab_file, **kwargs):
        made = read_tokenizer(Path(vocab_file).parent)
        super().__init__(tokenizer_object=made.backend_tokenizer, **kwargs)
"""


def make_with_code(path: Path) -> None:
    """As `make_qwen_vl_chat`, with the code that tokenizer_config.json names."""
    make_qwen_vl_chat(path)
    (path / "tokenization_qwen.py").write_text(_CODE, encoding="utf-8")


_NAMES = (
    (r"^model\.visual\.layers\.", "transformer.visual.transformer.resblocks."),
    (r"^model\.visual\.", "transformer.visual."),
    (r"^model\.embed_tokens\.", "transformer.wte."),
    (r"^model\.norm\.", "transformer.ln_f."),
    (r"^model\.layers\.", "transformer.h."),
    (r"\.(?:layer_norm1|input_layernorm)\.", ".ln_1."),
    (r"\.(?:layer_norm2|post_attention_layernorm)\.", ".ln_2."),
    (r"\.self_attn\.out_proj\.", ".attn.out_proj."),
    (r"\.self_attn\.o_proj\.", ".attn.c_proj."),
    (r"\.mlp\.fc1\.", ".mlp.c_fc."),
    (r"\.mlp\.(?:fc2|down_proj)\.", ".mlp.c_proj."),
    (r"\.mlp\.up_proj\.", ".mlp.w1."),
    (r"\.mlp\.gate_proj\.", ".mlp.w2."),
)


def publish(weights: dict[str, Any]) -> dict[str, Any]:
    """Weights under their published names, with the fused matrices."""
    import torch

    made: dict[str, Any] = {}
    for name, weight in weights.items():
        new = name
        for pattern, published in _NAMES:
            new = re.sub(pattern, published, new)
        made[new] = weight
    for name in [name for name in made if ".self_attn.q_proj." in name]:
        parts = [made.pop(name.replace(".q_proj.", f".{part}_proj.")) for part in "qkv"]
        if ".visual." in name:
            # Of each of two heads query, key and value.
            by_head = torch.stack([part.unflatten(0, (2, -1)) for part in parts], dim=1)
            made[name.replace(".self_attn.q_proj.", ".attn.in_proj.")] = by_head.flatten(0, 2)
        else:
            made[name.replace(".self_attn.q_proj.", ".attn.c_attn.")] = torch.cat(parts)
    return made


TINY: dict[str, Callable[[Path], None]] = {"qwen_vl": make_qwen_vl, "qwen_vl_chat": make_qwen_vl_chat}
IMAGE_FAMILIES = ("qwen_vl", "qwen_vl_chat")
CHATLESS_FAMILIES = IMAGE_FAMILIES
"""The family brings their templates."""
FORMS |= {"qwen_vl": "{}", "qwen_vl_chat": "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"}
MARKERS |= dict.fromkeys(TINY, ("Picture 1: <img></img>\n", ""))
