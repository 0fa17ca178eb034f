"""Tiny checkpoints for the models that vLLM's server tests name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from tests.compat import example_repositories, scripted

# Model of a test -> the tiny checkpoint that stands for it.
FAMILIES: Mapping[str, str] = {
    "Qwen/Qwen2-1.5B-Instruct": "qwen2",
    "Qwen/Qwen2.5-1.5B-Instruct": "qwen2",
    "Qwen/Qwen3-0.6B": "qwen2",
    "Qwen/Qwen3-1.7B": "qwen2",
    "Qwen/Qwen3-8B": "qwen2",
    "Qwen/Qwen3-4B": "qwen2",
    "HuggingFaceH4/zephyr-7b-beta": "llama",
    "HuggingFaceTB/SmolLM2-135M-Instruct": "llama",
    "hmellor/tiny-random-LlamaForCausalLM": "llama",
    "meta-llama/Llama-3.2-1B": "llama",
    "meta-llama/Llama-3.2-1B-Instruct": "llama",
    "unsloth/llama-3.2-1b-Instruct": "llama",
    "facebook/opt-125m": "opt",
    "Qwen/Qwen2.5-VL-3B-Instruct": "qwen2_5_vl",
    "Qwen/Qwen3-VL-2B-Instruct": "qwen3_vl",
    "llava-hf/llava-1.5-7b-hf": "llava",
}


def lay(hub: Path, name: str) -> Path | None:
    """The folder of a model in the cache folder `hub`; None if nothing stands for it."""
    family = FAMILIES.get(name)
    if family is None or name in example_repositories.REPOSITORIES:
        return example_repositories.lay(hub, name) if example_repositories.known(name) else None
    root = hub / f"models--{name.replace('/', '--')}"
    folder = root / "snapshots" / "main"
    if not folder.is_dir():
        (root / "refs").mkdir(parents=True, exist_ok=True)
        (root / "refs" / "main").write_text("main")
        folder.mkdir(parents=True)
        example_repositories._of(family)(folder)
        if name.startswith("Qwen/Qwen") and "VL" not in name:
            _template(folder, scripted.TEMPLATE)
    return folder


def _template(folder: Path, template: str) -> None:
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(config | {"chat_template": template}), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
