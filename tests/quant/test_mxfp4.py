"""MXFP4 checkpoints mean what their numbers and scales say."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from beheld.checkpoint.info import read_config, read_info
from beheld.core.config import EngineArgs
from beheld.core.errors import ModelError
from beheld.engine.setup import decide
from beheld.models.load import load_model
from beheld.quant.mxfp4 import open_weights
from beheld.quant.mxfp4_experts import dequantized
from tests import tiny, tiny_quantized

UP = "model.layers.0.mlp.experts.gate_up_proj"


def load(path: Path, dtype: str) -> Any:
    args = EngineArgs(model=str(path), dtype=dtype)
    config = read_config(path, args)
    info = read_info(path, args, config)
    return load_model(config, info, decide(args, info)).target.model


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_those_meant(dtype: str) -> None:
    path = tiny.checkpoint("gpt_oss")
    found, meant = (dict(load(p, dtype).named_parameters()) for p in (path, path / tiny_quantized.PLAIN))
    assert found.keys() == meant.keys()
    assert UP in found
    for name, value in found.items():
        assert value.dtype == meant[name].dtype == getattr(torch, dtype), name
        assert torch.equal(value, meant[name]), name


def test_every_number_of_four_bits_by_the_format() -> None:
    """A sign, two bits of an exponent with a bias of one, one of a fraction; without the exponent, halves."""
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 2, 8, 16)
    scales = torch.tensor([127, 128, 126, 1, 250, 120, 140, 127], dtype=torch.uint8).repeat(2).view(1, 2, 8)
    found = dequantized(blocks, scales)
    assert found.shape == (1, 256, 2)
    assert found.dtype == torch.bfloat16
    for output in range(2):
        for place in range(256):
            byte = int(blocks[0, output].flatten()[place // 2])
            bits = byte >> 4 if place % 2 else byte & 15
            exponent, fraction = bits >> 1 & 3, bits & 1
            number = fraction * 0.5 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + fraction / 2)
            factor = 2.0 ** (int(scales[0, output, place // 32]) - 127)
            assert float(found[0, place, output]) == (-number if bits & 8 else number) * factor


BROKEN: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no scales": (lambda weights: weights.pop(f"{UP}_scales"), "has no 'model.layers.0.mlp.experts.gate_up_proj_sc"),
    "no blocks": (lambda weights: weights.pop(f"{UP}_blocks"), "has no 'model.layers.0.mlp.experts.gate_up_proj_bl"),
    "shape": (lambda weights: weights.update({f"{UP}_scales": weights[f"{UP}_scales"][:, 1:].clone()}), "the shape"),
    "type": (lambda weights: weights.update({f"{UP}_scales": weights[f"{UP}_scales"].float()}), "F32"),
    "none": (lambda weights: [weights.pop(n) for n in list(weights) if "_blocks" in n or "_scales" in n], "none of"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_does_not_fit_is_refused(name: str, tmp_path: Path) -> None:
    change, reason = BROKEN[name]
    copied = tmp_path / "copied"
    shutil.copytree(tiny.checkpoint("gpt_oss"), copied)
    weights = load_file(copied / "model.safetensors")
    change(weights)
    save_file(weights, copied / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=reason):
        open_weights(copied)
