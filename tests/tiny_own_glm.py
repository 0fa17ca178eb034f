"""Small random checkpoint of GLM-4V-9B, laid out as zai-org/glm-4v-9b; see tiny.py for what they have in common."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import tiny
from tests import tiny_text as text
from tests.oracle.cases import Ask
from tests.tiny_media import FORMS, MARKERS
from tests.tiny_own_clip import write_model

SEEDS: dict[str, int] = {"glm4v_9b": 2}
"""Family -> the seed of its weights; chosen so that greedy choices are clear (see oracle/test_tiny.py)."""

SPECIALS = (
    "<|endoftext|>",
    "[MASK]",
    "[gMASK]",
    "[sMASK]",
    "<sop>",
    "<eop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<|begin_of_image|>",
    "<|end_of_image|>",
    "<|begin_of_video|>",
    "<|end_of_video|>",
)
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|"
    r"\s+"
)
# The ids of the published special tokens.
_FIRST = 151_329


def _write_tokenizer(path: Path, first: int | None = None) -> dict[str, int]:
    """tokenizer.model and tokenizer_config.json as published; the special tokens begin at `first`."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    draft = Tokenizer(models.BPE())
    draft.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=256 + 160, initial_alphabet=alphabet, show_progress=False)
    draft.train_from_iterator(text.CORPUS, trainer)
    bytes_by_letter = {letter: byte for byte, letter in bytes_to_unicode().items()}
    # A pair that the corpus does not have: a text's line break and the one before it are not to be joined.
    vocab = draft.get_vocab() | {"ĊĊ": draft.get_vocab_size()}
    words = {bytes(map(bytes_by_letter.__getitem__, word)): rank for word, rank in vocab.items()}
    # What no text of the tests has, so that the special tokens have their published ids.
    words |= {b"\xff\xfe" + rank.to_bytes(3, "big"): rank for rank in range(len(words), first or 0)}
    lines = [f"{base64.b64encode(word).decode()} {rank}\n" for word, rank in sorted(words.items(), key=lambda w: w[1])]
    (path / "tokenizer.model").write_text("".join(lines), encoding="ascii")
    ids = {token: len(words) + number for number, token in enumerate(SPECIALS)}
    kinds = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    settings = {
        "added_tokens_decoder": {str(index): {"content": token, **kinds} for token, index in ids.items()},
        "additional_special_tokens": list(SPECIALS),
        "auto_map": {"AutoTokenizer": ["tokenization_chatglm.ChatGLM4Tokenizer", None]},
        "clean_up_tokenization_spaces": False,
        "do_lower_case": False,
        "eos_token": "<|endoftext|>",
        "image_size": 84,
        "model_max_length": 8192,
        "pad_token": "<|endoftext|>",
        "padding_side": "left",
        "remove_space": False,
        "tokenizer_class": "ChatGLM4Tokenizer",
    }
    text.write_json(path / "tokenizer_config.json", settings)
    return {**vocab, **ids}


def make_glm4v_9b(path: Path) -> None:
    """As zai-org/glm-4v-9b: fused matrices, a tower whose norms come last, a tiktoken vocabulary."""
    _make(path, _write_tokenizer(path), tiny.VOCAB)


def make_wide_glm4v_9b(path: Path) -> None:
    """The same with special tokens at their published ids, which documents name."""
    _make(path, _write_tokenizer(path, _FIRST), 151_552)


def _make(path: Path, ids: dict[str, int], rows: int) -> None:
    config = {
        "_name_or_path": "THUDM/glm-4v-9b",
        "add_bias_linear": False,
        "add_qkv_bias": True,
        "apply_query_key_layer_scaling": True,
        "apply_residual_connection_post_layernorm": False,
        "architectures": ["ChatGLMModel"],
        "attention_dropout": 0.0,
        "attention_softmax_in_fp32": True,
        "attn_implementation": "sdpa",
        "auto_map": {
            "AutoConfig": "configuration_chatglm.ChatGLMConfig",
            "AutoModel": "modeling_chatglm.ChatGLMForConditionalGeneration",
            "AutoModelForCausalLM": "modeling_chatglm.ChatGLMForConditionalGeneration",
        },
        "bias_dropout_fusion": True,
        "boi_token_id": ids["<|begin_of_image|>"],
        "eoi_token_id": ids["<|end_of_image|>"],
        "eos_token_id": [ids["<|endoftext|>"], ids["<|user|>"], ids["<|observation|>"]],
        "ffn_hidden_size": 96,
        "fp32_residual_connection": False,
        "hidden_dropout": 0.0,
        "hidden_size": 128,
        "kv_channels": 32,
        "layernorm_epsilon": 1.5625e-07,
        "model_type": "chatglm",
        "multi_query_attention": True,
        "multi_query_group_num": 2,
        "num_attention_heads": 4,
        "num_layers": 3,
        "original_rope": True,
        "pad_token_id": ids["<|endoftext|>"],
        "padded_vocab_size": rows,
        "post_layer_norm": True,
        "rmsnorm": True,
        "seq_length": 8192,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.44.0",
        "use_cache": True,
        "vision_config": {
            "dropout_prob": 0.0,
            "hidden_act": "gelu",
            "hidden_size": 32,
            "image_size": 84,
            "in_channels": 3,
            "intermediate_size": 64,
            "layer_norm_eps": 1e-06,
            "num_heads": 2,
            "num_hidden_layers": 3,
            "num_positions": 37,
            "patch_size": 14,
            "scaling_factor": 8,
        },
    }
    generation = {
        "do_sample": True,
        "eos_token_id": config["eos_token_id"],
        "max_length": 8192,
        "pad_token_id": ids["<|endoftext|>"],
        "temperature": 0.8,
        "top_p": 0.8,
        "transformers_version": "4.44.0",
    }
    quiet = tuple(token for token in SPECIALS if token != "<|user|>")
    write_model(path, config, generation, ids, quiet, seed=SEEDS["glm4v_9b"], publish=_publish)


_NAMES = (
    (r"^lm_head\.", "transformer.output_layer."),
    (r"^model\.embed_tokens\.", "transformer.embedding.word_embeddings."),
    (r"^model\.norm\.", "transformer.encoder.final_layernorm."),
    (r"^model\.vision\.", "transformer.vision."),
    (r"^model\.layers\.(\d+)\.self_attn\.o_proj\.", r"model.layers.\1.self_attention.dense."),
    (r"^model\.layers\.(\d+)\.mlp\.gate_up_proj\.", r"model.layers.\1.mlp.dense_h_to_4h."),
    (r"^model\.layers\.(\d+)\.mlp\.down_proj\.", r"model.layers.\1.mlp.dense_4h_to_h."),
    (r"^model\.layers\.", "transformer.encoder.layers."),
)


def _publish(weights: dict[str, Any]) -> dict[str, Any]:
    """Weights under their published names, with the fused matrices; the image's ends as large as its patches."""
    import torch

    made: dict[str, Any] = {}
    for name, weight in weights.items():
        new = name
        for pattern, published in _NAMES:
            new = re.sub(pattern, published, new)
        if new.endswith(("linear_proj.dense_4h_to_h.weight", ".boi", ".eoi")):
            # What images become is divided by eight, and would hardly matter.
            weight = 8 * weight
        made[new] = weight
    for name in [name for name in made if "self_attn.q_proj" in name]:
        parts = [made.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv"]
        # Sharper attention would make much of the last bits of what it reads.
        parts[:2] = [0.5 * part for part in parts[:2]]
        made[name.replace("self_attn.q_proj", "self_attention.query_key_value")] = torch.cat(parts)
    made["transformer.rotary_pos_emb.inv_freq"] = 1 / 10000 ** (torch.arange(0, 16, 2) / 16)
    return made


TINY: dict[str, Callable[[Path], None]] = {"glm4v_9b": make_glm4v_9b}
IMAGE_FAMILIES = ("glm4v_9b",)
FORMS["glm4v_9b"] = "<|user|>\n{}<|assistant|>"
MARKERS["glm4v_9b"] = ("<|begin_of_image|><|endoftext|><|end_of_image|>", "")
# The repository's code makes the ids of a conversation itself.
CHATLESS_FAMILIES = LONE_FAMILIES = IMAGE_FAMILIES
REFERENCE_ASKS = {
    "glm4v_9b": {
        # Positions after an image inside of a text are those of the shorter prompt.
        "inside": Ask("A picture {i} and then. Which one is it?", ((112, 56, 8),), max_tokens=16),
    }
}
