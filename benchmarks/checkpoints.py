"""Checkpoints for benchmarks: the tests' tokenizers and processors, real sizes, random weights."""

from __future__ import annotations

import json
from pathlib import Path

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


def qwen2_5_vl_small(folder: Path) -> Path:
    """A Qwen2.5-VL shape of 0.43 B parameters in float32, made once in `folder`; returns its path."""
    path = folder / "qwen2_5_vl_043b"
    if (path / "model.safetensors").is_file():
        return path
    import shutil

    import torch
    from transformers import AutoConfig, Qwen2_5_VLForConditionalGeneration

    source = tiny.checkpoint("qwen2_5_vl")
    path.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if not file.name.endswith((".safetensors", ".index.json")):
            shutil.copy(file, path / file.name)
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    for name, value in TEXT.items():
        config[name] = value
    config["rope_scaling"] = {"type": "mrope", "mrope_section": [8, 12, 12]}
    config["vision_config"].update(VISION)
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
