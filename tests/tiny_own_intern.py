"""Small random checkpoints of the families around InternViT in their publishers' layouts.

Each is laid out as the checkpoint that its function names; see tiny.py for what they have in common.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import tiny
from tests import tiny_text as text
from tests.tiny_media import FORMS, MARKERS
from tests.tiny_more import CHATML_TURN, chat, pixels

SEEDS: dict[str, int] = {"internvl_chat": 1, "internvl_chat_qwen2": 1, "h2ovl_chat": 1, "nvlm_d": 3, "interns1": 1}
"""Family -> the seed of its weights; chosen so that greedy choices are clear (see oracle/test_tiny.py)."""

SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "vocab_size": tiny.VOCAB,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
}
"""Heads of 32, the smallest that other implementations take."""
TOWER = {
    "architectures": ["InternVisionModel"],
    "attention_dropout": 0.0,
    "drop_path_rate": 0.0,
    "dropout": 0.0,
    "hidden_act": "gelu",
    "hidden_size": 64,
    "image_size": 56,
    "initializer_factor": 1.0,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "layer_norm_eps": 1e-6,
    "model_type": "intern_vit_6b",
    "norm_type": "layer_norm",
    "num_attention_heads": 2,
    "num_channels": 3,
    "num_hidden_layers": 2,
    "patch_size": 14,
    "qk_normalization": False,
    "qkv_bias": True,
    "torch_dtype": "bfloat16",
    "use_flash_attn": True,
}
SETTINGS = {
    "downsample_ratio": 0.5,
    "dynamic_image_size": True,
    "force_image_size": 56,
    "max_dynamic_patch": 4,
    "min_dynamic_patch": 1,
    "ps_version": "v2",
    "select_layer": -1,
    "torch_dtype": "bfloat16",
    "use_backbone_lora": 0,
    "use_llm_lora": 0,
    "use_thumbnail": True,
}
PIXELS = {
    "crop_size": 56,
    "do_center_crop": True,
    "do_normalize": True,
    "do_resize": True,
    "feature_extractor_type": "CLIPFeatureExtractor",
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
    "resample": 3,
    "size": 56,
}
VISION_MARKS = ("<img>", "</img>", "<IMG_CONTEXT>", "<quad>", "</quad>", "<ref>", "</ref>", "<box>", "</box>")
CHATML = """{{ bos_token }}{% for message in messages %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""

# transformers' name -> the published one, which the tower and Qwen's text share; matrices that are one there follow.
_PUBLISHED = (
    (r"^model\.vision_tower\.embeddings\.cls_token$", "vision_model.embeddings.class_embedding"),
    (r"^model\.vision_tower\.embeddings\.position_embeddings$", "vision_model.embeddings.position_embedding"),
    (r"^model\.vision_tower\.embeddings\.patch_embeddings\.projection\.", "vision_model.embeddings.patch_embedding."),
    (r"^model\.vision_tower\.encoder\.layer\.", "vision_model.encoder.layers."),
    (r"\.attention\.projection_layer\.", ".attn.proj."),
    (r"\.attention\.([qk]_norm)\.", r".attn.\1."),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"\.lambda_1$", ".ls1"),
    (r"\.lambda_2$", ".ls2"),
    (r"^model\.multi_modal_projector\.layer_norm\.", "mlp1.0."),
    (r"^model\.multi_modal_projector\.linear_1\.", "mlp1.1."),
    (r"^model\.multi_modal_projector\.linear_2\.", "mlp1.3."),
    (r"^model\.language_model\.", "language_model.model."),
    (r"^lm_head\.", "language_model.lm_head."),
)
_INTERNLM2 = (
    (r"^language_model\.lm_head\.", "language_model.output."),
    (r"\.embed_tokens\.", ".tok_embeddings."),
    (r"\.self_attn\.o_proj\.", ".attention.wo."),
    (r"\.mlp\.gate_proj\.", ".feed_forward.w1."),
    (r"\.mlp\.down_proj\.", ".feed_forward.w2."),
    (r"\.mlp\.up_proj\.", ".feed_forward.w3."),
    (r"\.input_layernorm\.", ".attention_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
)


def publish(weights: dict[str, Any], groups: int = 0) -> dict[str, Any]:
    """Weights under their published names; `groups` key heads make one matrix of InternLM2's three."""
    import torch

    made: dict[str, Any] = {}
    for name, weight in weights.items():
        new = name
        for pattern, published in (*_PUBLISHED, *(_INTERNLM2 if groups else ())):
            new = re.sub(pattern, published, new)
        made[new] = weight
    for name in [name for name in made if "vision_model" in name and ".attention.q_proj." in name]:
        parts = [made.pop(name.replace("q_proj", part)) for part in ("q_proj", "k_proj", "v_proj")]
        made[name.replace("attention.q_proj", "attn.qkv")] = torch.cat(parts)
    if groups:
        for name in [name for name in made if ".self_attn.q_proj." in name]:
            parts = [made.pop(name.replace("q_proj", part)) for part in ("q_proj", "k_proj", "v_proj")]
            heads = [part.unflatten(0, (groups, -1, 32)) for part in parts]
            made[name.replace("self_attn.q_proj", "attention.wqkv")] = torch.cat(heads, dim=1).flatten(0, 2)
    return {name: weight.contiguous() for name, weight in made.items()}


def write_model(
    path: Path,
    config: dict[str, Any],
    generation: dict[str, Any],
    ids: dict[str, int],
    quiet: tuple[str, ...],
    *,
    seed: int,
    rename: Callable[[dict[str, Any]], dict[str, Any]] = publish,
) -> None:
    """config.json and random weights under published names; the tokens `quiet` hardly ever win."""
    import torch
    from safetensors.torch import save_file

    from beheld.families import registry

    config = tiny._reshape.get()(config)
    package = registry.find(config["model_type"], config["architectures"])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model_class = registry.own_class(package, "model")
        model = model_class._from_config(registry.own_class(package, "config").from_dict(config), dtype=torch.float32)
        tiny._fill(model)
    with torch.no_grad():
        model.lm_head.weight[[*(ids[token] for token in quiet), *range(len(ids), tiny.VOCAB)]] *= 0.05
    weights = {name: weight.detach().to(torch.bfloat16) for name, weight in model.state_dict().items()}
    save_file(rename(weights), path / "model.safetensors", metadata={"format": "pt"})
    text.write_json(path / "config.json", config)
    text.write_json(path / "generation_config.json", generation | {"transformers_version": "4.37.2"})
    text.write_json(path / "preprocessor_config.json", PIXELS)


# --- InternVL --------------------------------------------------------------------------------------------------------

INTERNLM2_TURNS = ("<|plugin|>", "<|interpreter|>", "<|action_end|>", "<|action_start|>", "<|im_end|>", "<|im_start|>")


def write_internlm2_tokenizer(path: Path, marks: tuple[str, ...] = VISION_MARKS) -> dict[str, int]:
    """A SentencePiece model whose unused pieces tokenizer_config.json gives other names; without a tokenizer.json."""
    from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(text.CORPUS[:-1]),
        model_writer=model,
        model_type="bpe",
        vocab_size=440,
        byte_fallback=True,
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        character_coverage=1.0,
        user_defined_symbols=[f"[UNUSED_TOKEN_{141 + n}]" for n in range(len(INTERNLM2_TURNS))],
        hard_vocab_limit=False,
        minloglevel=2,
        pad_id=-1,
    )
    (path / "tokenizer.model").write_bytes(model.getvalue())
    pieces = SentencePieceProcessor(model_proto=model.getvalue())
    unused = [pieces.piece_to_id(f"[UNUSED_TOKEN_{141 + n}]") for n in range(len(INTERNLM2_TURNS))]
    size = pieces.get_piece_size()
    added = {token: size + n for n, token in enumerate(marks)}
    named = {"<unk>": 0, "<s>": 1, "</s>": 2} | dict(zip(INTERNLM2_TURNS, unused, strict=True)) | added
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    settings = {
        "added_tokens_decoder": {str(index): {"content": token} | flags for token, index in named.items()},
        "additional_special_tokens": [*INTERNLM2_TURNS[::-1], *marks],
        "auto_map": {"AutoTokenizer": ["tokenization_internlm2.InternLM2Tokenizer", None]},
        "bos_token": "<s>",
        "chat_template": CHATML,
        "clean_up_tokenization_spaces": False,
        "eos_token": "</s>",
        "model_max_length": 8192,
        "pad_token": "</s>",
        "tokenizer_class": "InternLM2Tokenizer",
        "unk_token": "<unk>",
    }
    text.write_json(path / "tokenizer_config.json", settings)
    text.write_json(path / "added_tokens.json", added)
    words = {pieces.id_to_piece(index): index for index in range(size)}
    return {word: index for word, index in words.items() if index not in unused} | named


INTERNLM2 = SHAPE | {
    "architectures": ["InternLM2ForCausalLM"],
    "bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "model_type": "internlm2",
    "pad_token_id": 2,
    "rope_scaling": {"factor": 2.0, "type": "dynamic"},
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
}


def make_internvl_chat(path: Path) -> None:
    """As OpenGVLab/InternVL2-2B: InternLM2 with one matrix for its heads, and only tokenizer.model."""
    ids = write_internlm2_tokenizer(path)
    config = SETTINGS | {
        "architectures": ["InternVLChatModel"],
        "auto_map": {"AutoConfig": "configuration_internvl_chat.InternVLChatConfig"},
        "llm_config": INTERNLM2,
        "model_type": "internvl_chat",
        "pad2square": False,
        "template": "internlm2-chat",
        "vision_config": TOWER,
    }
    generation = {"eos_token_id": [ids["<|im_end|>"], ids["</s>"]]}
    quiet = ("<unk>", "<s>", *INTERNLM2_TURNS[:4], "<|im_start|>", *VISION_MARKS)
    write_model(
        path,
        config,
        generation,
        ids,
        quiet,
        seed=SEEDS["internvl_chat"],
        rename=lambda weights: publish(weights, groups=2),
    )


def make_internvl_chat_qwen2(path: Path) -> None:
    """As OpenGVLab/InternVL3-2B: the same around Qwen2."""
    specials = (*text.QWEN_SPECIALS, *VISION_MARKS)
    ids = text.write_qwen_tokenizer(
        path, specials, "<|im_end|>", {"chat_template": CHATML.replace("{{ bos_token }}", "")}
    )
    config = SETTINGS | {
        "architectures": ["InternVLChatModel"],
        "hidden_size": SHAPE["hidden_size"],
        "llm_config": qwen2(ids),
        "model_type": "internvl_chat",
        "pad2square": False,
        "template": "internvl2_5",
        "tie_word_embeddings": False,
        "vision_config": TOWER,
    }
    generation = {"eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]]}
    quiet = tuple(token for token in specials if token != "<|im_end|>")
    write_model(path, config, generation, ids, quiet, seed=SEEDS["internvl_chat_qwen2"])


def qwen2(ids: dict[str, int]) -> dict[str, Any]:
    """An llm_config."""
    return SHAPE | {
        "architectures": ["Qwen2ForCausalLM"],
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "hidden_act": "silu",
        "model_type": "qwen2",
        "rope_scaling": {"factor": 2.0, "rope_type": "dynamic", "type": "dynamic"},
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
    }


# --- H2OVL and NVLM-D ------------------------------------------------------------------------------------------------

H2OGPT = """{% for message in messages %}{% if message['role'] == 'user' %}{{ '<|prompt|>' + message['content'] \
+ eos_token }}{% elif message['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% else %}\
{{ '<|answer|>' + message['content'] + eos_token }}{% endif %}{% if loop.last and add_generation_prompt %}\
{{ '<|answer|>' }}{% endif %}{% endfor %}"""


def make_h2ovl_chat(path: Path) -> None:
    """As h2oai/h2ovl-mississippi-800m: Danube 3, a Llama, and two grids for a lone picture."""
    marks = (*VISION_MARKS, "<|prompt|>", "<|answer|>")
    settings = {"add_bos_token": False, "chat_template": H2OGPT, "pad_token": "<unk>"}
    ids = text.write_llama_tokenizer(path, marks, settings)
    # Without a space before a text: others replace images among ids, after the text was encoded without them.
    stored = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
    stored["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    stored["decoder"]["decoders"].pop()
    text.write_json(path / "tokenizer.json", stored)
    config = SETTINGS | {
        "architectures": ["H2OVLChatModel"],
        "auto_map": {"AutoConfig": "configuration_h2ovl_chat.H2OVLChatConfig"},
        "llm_config": SHAPE
        | {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "bos_token_id": ids["<s>"],
            "eos_token_id": ids["</s>"],
            "hidden_act": "silu",
            "mlp_bias": False,
            "model_type": "llama",
            "pad_token_id": 0,
            "rope_scaling": None,
            "rope_theta": 100000,
            "tie_word_embeddings": False,
        },
        "max_dynamic_patch": 6,
        "model_type": "h2ovl_chat",
        "pad2square": False,
        "template": "h2ogpt2",
        "use_msac": True,
        "vision_config": TOWER,
    }
    generation = {"bos_token_id": ids["<s>"], "eos_token_id": ids["</s>"]}
    write_model(path, config, generation, ids, ("<unk>", "<s>", *marks), seed=SEEDS["h2ovl_chat"])


def make_nvlm_d(path: Path) -> None:
    """As nvidia/NVLM-D-72B: InternViT-6B with norms of queries and keys, an odd number of heads, and seven more."""
    specials = text.QWEN_SPECIALS
    settings = {"chat_template": CHATML.replace("{{ bos_token }}", "")}
    ids = text.write_qwen_tokenizer(path, specials, "<|im_end|>", settings)
    config = SETTINGS | {
        "architectures": ["NVLM_D"],
        "auto_map": {"AutoConfig": "configuration_nvlm_d.NVLM_D_Config"},
        # Published with the model type of another class.
        "llm_config": qwen2(ids)
        | {"attention_bias": True, "mlp_bias": False, "model_type": "llama"}
        | {"rope_scaling": {"factor": 3.0, "type": "dynamic"}},
        "model_type": "NVLM_D",
        "template": "chatml",
        "vision_config": TOWER
        | {"hidden_size": 80, "norm_type": "rms_norm", "num_attention_heads": 5}
        | {"initializer_factor": 0.1, "qk_normalization": True, "qkv_bias": False},
    }
    generation = {"eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]]}
    quiet = tuple(token for token in specials if token != "<|im_end|>")
    write_model(path, config, generation, ids, quiet, seed=SEEDS["nvlm_d"])


# --- Intern-S1 -------------------------------------------------------------------------------------------------------

# Twenty-six, as in the published tokenizer; the further vocabularies follow.
S1_CONTROL = (
    *text.QWEN_SPECIALS,
    *("<tool_call>", "</tool_call>", "<think>", "</think>"),
    *("<img>", "</img>", "<IMG_CONTEXT>", "<video>", "<quad>", "</quad>", "<ref>", "</ref>"),
)
S1_FORMULAS = {
    "SMILES": ("CC1=CC=CC=C1C=O", "CC(C)(C)OC(=O)N", ("<SMILES>", "</SMILES>", "<SELFIES>", "</SELFIES>")),
    "IUPAC": ("2-methylpropan-2-ol", "ethyl acetate", ("<IUPAC>", "</IUPAC>")),
    "FASTA": ("MKTAYIAKQRQISFVKSHFSRQ", "MADEEKLPPGWEKRMSRSSG", ()),
}


def write_interns1_tokenizer(path: Path) -> dict[str, int]:
    """Qwen's tokenizer, cut down to leave ids for three further vocabularies; without a tokenizer.json."""
    from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

    text.write_qwen_tokenizer(path, S1_CONTROL, "<|im_end|>", {"bos_token": None})
    (path / "tokenizer.json").unlink()
    vocab = json.loads((path / "vocab.json").read_text(encoding="utf-8"))
    vocab = dict(list(vocab.items())[:380])
    text.write_json(path / "vocab.json", vocab)
    lines = (path / "merges.txt").read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if line.startswith("#") or line.replace(" ", "") in vocab]
    (path / "merges.txt").write_text("\n".join(kept) + "\n", encoding="utf-8")
    named = {token: len(vocab) + number for number, token in enumerate(S1_CONTROL)}
    size = len(vocab) + len(S1_CONTROL)
    for name, (one, other, marks) in S1_FORMULAS.items():
        model = io.BytesIO()
        SentencePieceTrainer.train(
            sentence_iterator=iter([one, other]),
            model_writer=model,
            model_type="bpe",
            vocab_size=30,
            hard_vocab_limit=False,
            minloglevel=2,
        )
        (path / f"tokenizer_{name}.model").write_bytes(model.getvalue())
        size += SentencePieceProcessor(model_proto=model.getvalue()).get_piece_size()
        named |= {mark: size + number for number, mark in enumerate(marks)}
        size += len(marks)
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    settings = json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8")) | {
        "added_tokens_decoder": {str(index): {"content": token} | flags for token, index in named.items()},
        "auto_map": {"AutoTokenizer": ["tokenization_interns1.InternS1Tokenizer", None]},
        "processor_class": "InternVLProcessor",
        "tokenizer_class": "InternS1Tokenizer",
    }
    text.write_json(path / "tokenizer_config.json", settings)
    form = chat("<|im_start|>%role%\\n", "<|im_end|>\\n", "<IMG_CONTEXT>\\n", "<video>\\n")
    form += "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
    (path / "chat_template.jinja").write_text(form, encoding="utf-8")
    return (
        vocab
        | named
        | {f"piece {number}": number for number in range(len(vocab), size) if number not in named.values()}
    )


def make_interns1(path: Path) -> None:
    """As internlm/Intern-S1-mini: transformers' InternVL around Qwen3 under other names."""
    ids = write_interns1_tokenizer(path)
    assert len(ids) <= tiny.VOCAB
    config = {
        "architectures": ["InternS1ForConditionalGeneration"],
        "auto_map": {"AutoConfig": "configuration_interns1.InternS1Config"},
        "downsample_ratio": 0.5,
        "image_seq_length": 4,
        "image_token_id": ids["<IMG_CONTEXT>"],
        "model_type": "interns1",
        "projector_hidden_act": "gelu",
        "text_config": SHAPE
        | {
            "architectures": ["Qwen3ForCausalLM"],
            "attention_bias": False,
            "bos_token_id": ids["<|endoftext|>"],
            "eos_token_id": ids["<|im_end|>"],
            "head_dim": 32,
            "hidden_act": "silu",
            "model_type": "qwen3",
            "rope_scaling": None,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "use_sliding_window": False,
        },
        "torch_dtype": "bfloat16",
        "vision_config": {
            "architectures": ["InternVisionModel"],
            "attention_bias": True,
            "attention_dropout": 0.0,
            "drop_path_rate": 0.1,
            "hidden_act": "gelu",
            "hidden_dropout_prob": 0.0,
            "hidden_size": 64,
            "image_size": [56, 56],
            "initializer_factor": 0.1,
            "initializer_range": 1e-10,
            "intermediate_size": 96,
            "layer_norm_eps": 1e-6,
            "layer_scale_init_value": 0.1,
            "model_type": "interns1_vision",
            "norm_type": "layer_norm",
            "num_attention_heads": 2,
            "num_channels": 3,
            "num_hidden_layers": 2,
            "patch_size": [14, 14],
            "projection_dropout": 0.0,
            "use_absolute_position_embeddings": True,
            "use_mask_token": False,
            "use_mean_pooling": True,
            "use_qk_norm": False,
        },
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
    }
    quiet = tuple(token for token, index in ids.items() if index >= 380 and token != "<|im_end|>")
    generation = {"eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]]}
    write_model(path, config, generation, ids, quiet, seed=SEEDS["interns1"], rename=lambda weights: weights)
    size = {"size": {"height": 56, "width": 56}}
    tiles = {"crop_to_patches": False, "max_patches": 4, "min_patches": 1}
    processor = {"processor_class": "InternVLProcessor"}
    values = pixels("GotOcr2ImageProcessor", "InternVLProcessor", **size, **tiles)
    text.write_json(path / "preprocessor_config.json", values)
    text.write_json(path / "processor_config.json", processor | {"image_seq_length": 4})
    del values["image_processor_type"], values["crop_to_patches"], values["max_patches"], values["min_patches"]
    videos = {"auto_map": {}, "video_processor_type": "InternVLVideoProcessor"}
    text.write_json(path / "video_preprocessor_config.json", values | videos)


TINY: dict[str, Callable[[Path], None]] = {
    "interns1": make_interns1,
    "h2ovl_chat": make_h2ovl_chat,
    "nvlm_d": make_nvlm_d,
    "internvl_chat": make_internvl_chat,
    "internvl_chat_qwen2": make_internvl_chat_qwen2,
}
IMAGE_FAMILIES = tuple(TINY)
VIDEO_FAMILIES = ("interns1",)
CHATLESS_FAMILIES = tuple(name for name in TINY if name != "interns1")
INTERNLM2_TURN = "<s><|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
FORMS.update({"internvl_chat": INTERNLM2_TURN, "internvl_chat_qwen2": CHATML_TURN})
FORMS.update({"h2ovl_chat": "<|prompt|>{}</s><|answer|>", "nvlm_d": CHATML_TURN})
FORMS.update({"interns1": CHATML_TURN})
MARKERS.update(dict.fromkeys(TINY, ("<image>\n", "")))
MARKERS.update({"interns1": ("<IMG_CONTEXT>\n", "<video>\n")})
