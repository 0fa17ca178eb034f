"""NVFP4 checkpoints of compressed-tensors mean what their numbers and scales say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from beheld.core.errors import ModelError
from beheld.quant import compressed_tensors
from beheld.quant.compressed_tensors import CompressedTensors
from beheld.quant.method import StorageTarget
from tests import tiny
from tests.quant import stored_forms
from tests.quant.test_compressed_tensors import load, rewrite, same
from tests.quant.test_method import answers

MODULE = "model.layers.0.self_attn.q_proj"


def scheme(**own: Any) -> dict[str, Any]:
    """As llm-compressor writes it, W4A4."""
    common = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True} | own
    group = {
        "format": "nvfp4-pack-quantized",
        "input_activations": common | {"dynamic": "local"},
        "output_activations": None,
        "targets": ["Linear"],
        "weights": common | {"dynamic": False},
    }
    return {
        "config_groups": {"group_0": group},
        "format": "nvfp4-pack-quantized",
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def write(path: Path) -> Path:
    stored_forms.write(tiny.checkpoint("qwen2"), path, scheme(), stored_forms.nvfp4(), "lm_head")
    return path


def test_answers_are_those_of_the_numbers_that_are_meant(tmp_path: Path) -> None:
    path = write(tmp_path)
    assert answers(path) == answers(path / "plain")
    same(path, "bfloat16")


BROKEN: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no scale": (lambda weights: weights.pop(f"{MODULE}.weight_scale"), f"has no '{MODULE}.weight_scale'"),
    "no divisor": (lambda weights: weights.pop(f"{MODULE}.weight_global_scale"), "has no .*weight_global_scale"),
    "a divisor of zero": (
        lambda weights: weights.update({f"{MODULE}.weight_global_scale": torch.zeros(1)}),
        "is 0.0, which divides scales",
    ),
    "shape": (
        lambda weights: weights.update({f"{MODULE}.weight_scale": weights[f"{MODULE}.weight_scale"][:, :2].clone()}),
        r"has the shape \[64, 2\]; expected \[64, 4\]",
    ),
    "type": (lambda weights: weights.update({f"{MODULE}.weight_scale": torch.ones(64, 4)}), "type F32; expected F8"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_files_that_do_not_fit_are_refused(name: str, tmp_path: Path) -> None:
    change, reason = BROKEN[name]
    path = write(tmp_path)
    rewrite(path, change)
    with pytest.raises(ModelError, match=reason):
        load(path)


@pytest.mark.parametrize("own", [{"group_size": 32}, {"strategy": "channel"}, {"symmetric": False}])
def test_another_form_is_refused_by_name(own: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="nvfp4-pack-quantized"):
        CompressedTensors(scheme(**own), StorageTarget("cpu", torch.float32))


def test_the_log_says_that_they_are_dequantized(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(compressed_tensors.logger, "warning", lambda form, *given: said.append(form % given))
    method = CompressedTensors(scheme(), StorageTarget("cpu", torch.bfloat16))
    assert method.loading(nn.Module, {}) is nn.Module
    assert said[0].startswith("NVFP4 weights are dequantized as they are loaded, because products of NVFP4 numbers")
