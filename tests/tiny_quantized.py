"""Small checkpoints of quantized weights, FP8 as compressed-tensors writes them or MXFP4, made of plain ones.

Each has a folder `plain` inside: the same model with the numbers that its weights stand for, which transformers
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


def quantize_mxfp4(source: Path, path: Path) -> None:
    """Write `source` into the empty folder `path` with MXFP4 experts as openai stores them, and its plain twin."""
    import torch
    from safetensors.torch import load_file, save_file

    plain = path / PLAIN
    for folder in (path, plain):
        shutil.copytree(source, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors*", PLAIN))
    levels = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    stored: dict[str, Any] = {}
    meant: dict[str, Any] = {}
    for name, weight in load_file(source / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = weight
            meant[name] = weight.float()
            continue
        # In groups of 32 inputs, outputs first; exponents such that a group's largest number is between 4 and 6.
        groups = weight.float().transpose(1, 2).unflatten(2, (-1, 32))
        exponents = (groups.abs().amax(-1).clamp(min=1e-30).log2() - 2.0).ceil()
        numbers = groups / exponents.exp2().unsqueeze(-1)
        places = (numbers.abs().unsqueeze(-1) - levels).abs().argmin(-1)
        codes = (places + 8 * (numbers < 0)).to(torch.uint8)
        stored[f"{name}_blocks"] = (codes[..., ::2] | codes[..., 1::2] << 4).contiguous()
        stored[f"{name}_scales"] = (exponents + 127).to(torch.uint8)
        rounded = levels[places] * numbers.sign() * exponents.exp2().unsqueeze(-1)
        meant[name] = rounded.flatten(2).transpose(1, 2).contiguous()
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    save_file(meant, plain / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    spared = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    entry = {"modules_to_not_convert": spared, "quant_method": "mxfp4"}
    text.write_json(path / "config.json", config | {"quantization_config": entry})


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
    return folder / PLAIN if (folder / PLAIN).is_dir() else folder


TINY: dict[str, Callable[[Path], None]] = {"glm4v_moe_fp8": make_glm4v_moe_fp8}
IMAGE_FAMILIES = tuple(TINY)
VIDEO_FAMILIES = tuple(TINY)
FORMS["glm4v_moe_fp8"] = FORMS["glm4v_moe"]
MARKERS["glm4v_moe_fp8"] = MARKERS["glm4v_moe"]
