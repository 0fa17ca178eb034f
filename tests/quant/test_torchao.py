"""torchao checkpoints mean what their numbers, zero points and scales say."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from beheld.core.errors import ModelError
from beheld.quant.method import StorageTarget
from beheld.quant.torchao import make
from tests import tiny
from tests.quant import stored_forms
from tests.quant.test_compressed_tensors import load, restate, same
from tests.quant.test_method import answers

ENTRY = {"quant_method": "torchao", "quant_type": {"default": {"_type": "any", "_data": {}}}}
MODULE = "model.layers.0.self_attn.q_proj"
DATA = f"{MODULE}._weight_qdata"
# Form, torchao's class, block of a weight by its shape, other attributes.
Described = tuple[stored_forms.Form, str, Callable[[list[int]], list[int]], dict[str, Any]]
INT4 = {"target_dtype": {"_type": "torch.dtype", "_data": "int4"}}
FORMS: dict[str, Described] = {
    "int8 by output": (stored_forms.torchao_integers(8, None), "Int8Tensor", lambda shape: [1, shape[1]], {}),
    "int8, one scale": (stored_forms.torchao_integers(8, None, one=True), "Int8Tensor", lambda shape: shape, {}),
    "4 bits in int8": (stored_forms.torchao_integers(4, 32), "IntxUnpackedToInt8Tensor", lambda _: [1, 32], INT4),
    "int4": (stored_forms.torchao_nibbles(16), "Int4Tensor", lambda _: [1, 16], {}),
    "FP8 by output": (stored_forms.torchao_fp8((1, 0)), "Float8Tensor", lambda shape: [1, shape[1]], {}),
    "FP8 by block": (stored_forms.torchao_fp8((16, 32)), "Float8Tensor", lambda _: [16, 32], {}),
    "FP8, one scale": (stored_forms.torchao_fp8(None), "Float8Tensor", lambda shape: shape, {}),
}


def write(path: Path, name: str, family: str = "qwen2") -> None:
    form, kind, block_of, others = FORMS[name]
    stored_forms.write(tiny.checkpoint(family), path, ENTRY, form, "lm_head|visual")
    weights = load_file(path / "model.safetensors")
    told = {"format": "pt"}
    for entry, value in weights.items():
        if not entry.endswith("._weight_qdata"):
            continue
        module = entry.removesuffix("._weight_qdata")
        shape = [value.shape[0], value.shape[1] * (2 if kind == "Int4Tensor" else 1)]
        parts = [part for part in ("qdata", "scale", "zero_point") if f"{module}._weight_{part}" in weights]
        data = {"block_size": block_of(shape), "dtype": {"_type": "torch.dtype", "_data": "bfloat16"}, **others}
        told[f"{module}.weight"] = json.dumps({"_type": kind, "_data": data, "_tensor_data_names": parts})
    save_file(weights, path / "model.safetensors", metadata=told)


@pytest.mark.parametrize("name", FORMS)
def test_weights_are_those_meant(tmp_path: Path, name: str) -> None:
    write(tmp_path, name)
    same(tmp_path, "float32")


def test_answers_are_those_of_the_numbers_that_are_meant(tmp_path: Path) -> None:
    write(tmp_path, "4 bits in int8")
    assert answers(tmp_path) == answers(tmp_path / "plain")


def test_experts_stored_one_by_one(tmp_path: Path) -> None:
    write(tmp_path, "FP8 by output", "glm4v_moe")
    same(tmp_path, "bfloat16")


@pytest.mark.parametrize("name", ["int8 by output", "int8, one scale", "4 bits in int8", "int4"])
def test_numbers_that_are_kept_are_those_that_are_dequantized(tmp_path: Path, name: str) -> None:
    write(tmp_path, name)
    lazy = (make(ENTRY, StorageTarget("cpu", torch.bfloat16)).weights(tmp_path) or {})[f"{MODULE}.weight"]
    numbers, scale, low = lazy.fields()
    if lazy.form.bits == 4:
        numbers = torch.stack([numbers & 15, numbers >> 4], -1).flatten(1)
    assert lazy.form.bits == (8 if "int8 " in name or "int8," in name else 4)
    kept = numbers.float().unflatten(1, (lazy.form.groups, -1)) * scale.unsqueeze(-1) + low.unsqueeze(-1)
    torch.testing.assert_close(kept.flatten(1), lazy[...], rtol=0, atol=1e-5)


def rewrite(path: Path, change: Callable[[dict[str, Any], dict[str, str]], Any]) -> None:
    """Change the weights of a checkpoint, and what the file says of them."""
    file = path / "model.safetensors"
    with safe_open(file, framework="pt") as opened:
        told = dict(opened.metadata())
    weights = load_file(file)
    change(weights, told)
    save_file(weights, file, metadata=told)


def said(**changes: Any) -> Callable[[dict[str, Any], dict[str, str]], None]:
    """A change of what the file says of one weight."""

    def change(weights: dict[str, Any], told: dict[str, str]) -> None:
        whole = json.loads(told[f"{MODULE}.weight"])
        whole["_type"] = changes.pop("_type", whole["_type"])
        told[f"{MODULE}.weight"] = json.dumps(whole | {"_data": whole["_data"] | changes})

    return change


BROKEN: dict[str, tuple[Callable[[dict[str, Any], dict[str, str]], Any], str]] = {
    "not described": (lambda w, told: told.pop(f"{MODULE}.weight"), "is not described by the metadata"),
    "no JSON": (lambda w, told: told.update({f"{MODULE}.weight": "["}), "is not described by the metadata"),
    "type": (said(_type="Int4TilePackedTo4dTensor"), "is an Int4TilePackedTo4dTensor, which is not supported"),
    "activations": (said(act_pre_scale=1), "has scales of activations"),
    "target": (said(target_dtype="uint4"), "states the target_dtype 'uint4'"),
    "block": (said(block_size=[1, 36]), r"has the shape \[64, 64\], which blocks of \[1, 36\] do not divide"),
    "rows": (said(block_size=[2, 64]), "which are not supported"),
    "no scale": (lambda w, told: w.pop(f"{MODULE}._weight_scale"), f"has no '{MODULE}._weight_scale'"),
    "no numbers": (lambda w, told: w.pop(DATA), f"has no '{DATA}'"),
    "scales": (lambda w, told: w.update({f"{MODULE}._weight_scale": torch.ones(64, 1)}), r"expected \[64, 2\]"),
    "numbers": (lambda w, told: w.update({DATA: w[DATA].int()}), "type I32; expected I8"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_files_that_do_not_fit_are_refused(tmp_path: Path, name: str) -> None:
    change, reason = BROKEN[name]
    write(tmp_path, "4 bits in int8")
    rewrite(tmp_path, change)
    with pytest.raises(ModelError, match=reason):
        load(tmp_path)


def test_plain_weights_are_refused(tmp_path: Path) -> None:
    path = Path(shutil.copytree(tiny.checkpoint("qwen2"), tmp_path / "copied"))
    restate(path, lambda config: config.update(quantization_config=ENTRY))
    with pytest.raises(ModelError, match="none in the safetensors files is so"):
        load(path)
