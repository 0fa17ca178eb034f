"""Small checkpoints of quantized weights, made of plain ones by the specifications of the formats, with numpy.

Each has a folder `plain` inside: the same model with the numbers that its weights stand for.

Shapes: N outputs, K inputs, G groups of inputs.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests import tiny_text as text

PLAIN = "plain"
# Embeddings, routers; biases and norms have one dimension, convolutions more than two.
_SPARED = re.compile(r"embed|mlp\.gate\.weight$|pos_emb")
# Stored entries by what follows the module's name, and the numbers that they mean.
Form = Callable[[np.ndarray, int], tuple[dict[str, torch.Tensor], np.ndarray]]


def write(source: Path, path: Path, entry: dict[str, Any], form: Form, spared: str = "$^") -> None:
    """Write the checkpoint `source` into `path` with its linear layers in a form; modules named `spared` stay plain."""
    plain = path / PLAIN
    for folder in (path, plain):
        shutil.copytree(source, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors*", PLAIN))
    stored: dict[str, torch.Tensor] = {}
    meant: dict[str, torch.Tensor] = {}
    for count, (name, weight) in enumerate(load_file(source / "model.safetensors").items()):
        meant[name] = weight.float()
        if weight.dim() != 2 or not name.endswith(".weight") or _SPARED.search(name) or re.search(spared, name):
            stored[name] = weight
            continue
        parts, numbers = form(weight.float().numpy(), count)
        stored |= {name.removesuffix("weight") + key: value for key, value in parts.items()}
        meant[name] = torch.from_numpy(numbers)
    save_file({k: v.contiguous() for k, v in stored.items()}, path / "model.safetensors", metadata={"format": "pt"})
    save_file({k: v.contiguous() for k, v in meant.items()}, plain / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    text.write_json(path / "config.json", config | {"quantization_config": entry})


def as_words(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Write the numbers of the last dimension as one string of bits, the lowest bit of the first number first."""
    string = (numbers.astype(np.uint32)[..., None] >> np.arange(bits, dtype=np.uint32)) & 1
    string = string.reshape(*numbers.shape[:-1], -1, 32)
    return (string << np.arange(32, dtype=np.uint32)).sum(-1, dtype=np.uint32).view(np.int32)


def block_fp8(blocks: tuple[int, int] | None, suffix: str = "weight_scale_inv") -> Form:
    """FP8 with a scale for each block, or for the whole."""

    def form(weight_NK: np.ndarray, count: int) -> tuple[dict[str, torch.Tensor], np.ndarray]:
        height, width = blocks or weight_NK.shape
        rows, columns = (-(-size // step) for size, step in zip(weight_NK.shape, (height, width), strict=True))
        scales = np.empty((rows, columns), np.float32)
        meant = np.empty_like(weight_NK)
        eights = torch.empty(weight_NK.shape, dtype=torch.float8_e4m3fn)
        for row in range(rows):
            for column in range(columns):
                own = slice(row * height, (row + 1) * height), slice(column * width, (column + 1) * width)
                scales[row, column] = scale = np.float32(np.abs(weight_NK[own]).max() / 448)
                eights[own] = torch.from_numpy(weight_NK[own] / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
                meant[own] = eights[own].float().numpy() * scale
        scale_entry = torch.from_numpy(scales if blocks else scales.reshape(()))
        return {"weight": eights, suffix: scale_entry}, meant

    return form
