"""Checkpoints for benchmarks: the tests' tokenizers and processors, real sizes, random weights."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests import tiny

TEXT = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "num_key_value_heads": 4,
    "vocab_size": 151936,
}
VISION = {
    "depth": 6,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_heads": 8,
    "out_hidden_size": 1024,
    "fullatt_block_indexes": [5],
    "window_size": 112,
}
# Heads as wide as those of the larger one: attention kernels for a CPU refuse narrow ones.
TINY_TEXT = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
}
TINY_VISION = {
    "depth": 2,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_heads": 2,
    "out_hidden_size": 256,
    "fullatt_block_indexes": [1],
    "window_size": 112,
}


def qwen2_5_vl_small(folder: Path) -> Path:
    """A Qwen2.5-VL shape of 0.43 B parameters in float32, made once in `folder`; returns its path."""
    return _qwen2_5_vl(folder / "qwen2_5_vl_043b", TEXT, VISION)


def qwen2_5_vl_bfloat16(folder: Path) -> Path:
    """The same weights stored in bfloat16; returns its path."""
    from safetensors.torch import load_file, save_file

    source, path = qwen2_5_vl_small(folder), folder / "qwen2_5_vl_043b_bfloat16"
    if not path.is_dir():
        draft = folder / f"draft_{os.getpid()}"
        shutil.copytree(source, draft, ignore=shutil.ignore_patterns("*.safetensors"))
        weights = {name: weight.bfloat16() for name, weight in load_file(source / "model.safetensors").items()}
        save_file(weights, draft / "model.safetensors", metadata={"format": "pt"})
        _edit(draft / "config.json", {"torch_dtype": "bfloat16"})
        draft.rename(path)
    return path


def qwen2_5_vl_served(folder: Path, size: str) -> Path:
    """The same to be served ("small"), or one of 5 million parameters ("tiny"): every id of the vocabulary is a word,
    so that every token is a piece of text, and a picture of 224 x 224 pixels is seen as it is, in 64 embeddings."""
    path = folder / f"qwen2_5_vl_served_{size}"
    if not path.is_dir():
        # Under another name until it is whole.
        draft = folder / f"draft_{os.getpid()}"
        text, vision = {"small": (TEXT, VISION), "tiny": (TINY_TEXT, TINY_VISION)}[size]
        _qwen2_5_vl(draft, text, vision)
        _fill_vocabulary(draft, text["vocab_size"])
        for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
            _edit(draft / name, {"min_pixels": 4 * 28 * 28, "max_pixels": 1280 * 28 * 28})
        draft.rename(path)
    return path


def in_files(path: Path, family: str, fields: Mapping[str, Any], files: Iterable[Mapping[str, Any]]) -> Path:
    """Write a checkpoint file by file, once; returns its path.

    Args:
        family: of the tiny checkpoint that gives all but the weights.
        fields: what config.json has in place of its fields.
        files: the weights of each file, by name; none for a checkpoint without weights.
    """
    from safetensors.torch import save_file

    if path.is_dir():
        return path
    # Under another name until it is whole.
    draft = path.with_name(f"draft_{path.name}")
    shutil.copytree(tiny.checkpoint(family), draft, ignore=shutil.ignore_patterns("*.safetensors*", "plain"))
    _edit(draft / "config.json", dict(fields))
    index: dict[str, str] = {}
    for number, weights in enumerate(files):
        file = f"model-{number:05}.safetensors"
        save_file({name: value.cpu() for name, value in weights.items()}, draft / file, metadata={"format": "pt"})
        index |= dict.fromkeys(weights, file)
    if index:
        named = {"metadata": {}, "weight_map": index}
        (draft / "model.safetensors.index.json").write_text(json.dumps(named), encoding="utf-8")
    draft.rename(path)
    return path


def _qwen2_5_vl(path: Path, text: dict[str, Any], vision: dict[str, Any]) -> Path:
    if (path / "model.safetensors").is_file():
        return path

    import torch
    from transformers import AutoConfig, Qwen2_5_VLForConditionalGeneration

    source = tiny.checkpoint("qwen2_5_vl")
    path.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if not file.name.endswith((".safetensors", ".index.json")):
            shutil.copy(file, path / file.name)
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    config |= text
    config["rope_scaling"] = {"type": "mrope", "mrope_section": [8, 12, 12]}
    config["vision_config"].update(vision)
    config["torch_dtype"] = "float32"
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration._from_config(AutoConfig.from_pretrained(path), dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0.0, 0.02)
    model.save_pretrained(path)
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


def _fill_vocabulary(path: Path, size: int) -> None:
    """Words for all ids that are free, before the special tokens, whose ids move up to the end.

    No merges lead to the words, so texts are tokenized as before.
    """
    tokenizer = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
    known, special = tokenizer["model"]["vocab"], tokenizer["added_tokens"]
    up = size - len(special) - len(known)
    known |= {f"Ġw{number}": number for number in range(len(known), size - len(special))}
    for token in special:
        token["id"] += up
    (path / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    (path / "vocab.json").write_text(json.dumps(known, ensure_ascii=False), encoding="utf-8")
    settings = json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8"))
    moved = {str(int(number) + up): token for number, token in settings["added_tokens_decoder"].items()}
    _edit(path / "tokenizer_config.json", {"added_tokens_decoder": moved})
    for name in ("config.json", "generation_config.json"):
        fields = json.loads((path / name).read_text(encoding="utf-8"))
        ids = {key: value for key, value in fields.items() if key.endswith("_token_id")}
        _edit(path / name, {key: [i + up for i in v] if isinstance(v, list) else v + up for key, v in ids.items()})


def _edit(path: Path, fields: dict[str, Any]) -> None:
    found = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(found | fields, ensure_ascii=False), encoding="utf-8")
