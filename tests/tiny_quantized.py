"""Small checkpoints with FP8 weights, as compressed-tensors writes them, made of those that are not quantized.

Each has a folder `plain` inside: the same model with the numbers that its FP8 weights stand for, which transformers
reads without that package.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import tiny
from tests import tiny_text as text
from tests.tiny_media import FORMS, MARKERS

PLAIN = "plain"
FP8_MAX = 448.0
IGNORED = ("re:.*visual.*", "lm_head", r"re:.*mlp\.gate$")
# Quantized by class: what is a Linear in the model, by the last part of its name in the file.
_LINEAR = re.compile(r"\.(?:[qkvo]|gate|up|down)_proj\.weight$")


def make_glm4v_moe_fp8(path: Path) -> None:
    """As zai-org/GLM-4.5V-FP8: weights of the language model by channel, activations by token."""
    with tempfile.TemporaryDirectory(prefix="beheld-tiny-") as folder:
        # Made anew, since it may be wanted in another shape.
        tiny.TINY["glm4v_moe"](Path(folder))
        quantize(Path(folder), path, "bfloat16")


def quantize(source: Path, path: Path, scale_dtype: str) -> None:
    """Write the checkpoint `source` into the empty folder `path` with FP8 weights, and its plain twin inside it."""
    import torch
    from safetensors.torch import load_file, save_file

    plain = path / PLAIN
    for folder in (path, plain):
        shutil.copytree(source, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors*", PLAIN))
    stored: dict[str, Any] = {}
    meant: dict[str, Any] = {}
    for name, weight in load_file(source / "model.safetensors").items():
        stored[name] = weight
        meant[name] = weight.float()
        if not _LINEAR.search(name) or "visual" in name:
            continue
        scale = (weight.float().abs().amax(-1, keepdim=True) / FP8_MAX).to(getattr(torch, scale_dtype))
        # A scale rounded down would make the largest number of its row overflow.
        rounded = (weight.float() / scale.float()).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
        stored |= {name: rounded, f"{name}_scale": scale}
        meant[name] = rounded.float() * scale.float()
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    save_file(meant, plain / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    text.write_json(path / "config.json", config | {"quantization_config": scheme()})


def scheme() -> dict[str, Any]:
    """The entry `quantization_config`."""
    common = {
        "actorder": None,
        "block_structure": None,
        "group_size": None,
        "num_bits": 8,
        "observer_kwargs": {},
        "symmetric": True,
        "type": "float",
    }
    group = {
        "input_activations": common | {"dynamic": True, "observer": None, "strategy": "token"},
        "output_activations": None,
        "targets": ["Linear"],
        "weights": common | {"dynamic": False, "observer": "minmax", "strategy": "channel"},
    }
    return {
        "config_groups": {"group_0": group},
        "format": "float-quantized",
        "global_compression_ratio": None,
        "ignore": list(IGNORED),
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def readable(family: str, folder: Path) -> Path:
    """Where transformers reads the checkpoint of `family` that lies in `folder`."""
    return folder / PLAIN if family in TINY else folder


TINY: dict[str, Callable[[Path], None]] = {"glm4v_moe_fp8": make_glm4v_moe_fp8}
IMAGE_FAMILIES = tuple(TINY)
VIDEO_FAMILIES = tuple(TINY)
FORMS["glm4v_moe_fp8"] = FORMS["glm4v_moe"]
MARKERS["glm4v_moe_fp8"] = MARKERS["glm4v_moe"]
