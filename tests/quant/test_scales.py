"""Scales of zero, and those that are no numbers, are refused by name, in every form."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from beheld import LLM
from beheld.checkpoint.gguf.header import read_header
from beheld.core.errors import ModelError
from tests import tiny, tiny_gguf
from tests.quant import (
    stored_forms,
    test_awq,
    test_bitsandbytes,
    test_compressed_integers,
    test_fp8,
    test_gptq,
    test_nvfp4,
    test_torchao,
)
from tests.quant.test_compressed_tensors import load

MODULE = "model.layers.1.mlp.gate_proj"
_INTEGERS = test_compressed_integers.FORMS


def _copied(family: str) -> Callable[[Path], Any]:
    return lambda path: shutil.copytree(tiny.checkpoint(family), path, dirs_exist_ok=True)


def _written(entry: dict[str, Any], form: stored_forms.Form) -> Callable[[Path], Any]:
    return lambda path: stored_forms.write(tiny.checkpoint("qwen2"), path, entry, form, "lm_head")


# What writes a checkpoint, and the name of one weight's scales.
FORMS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "awq": (_written(test_awq.ENTRY, stored_forms.awq(16)), f"{MODULE}.scales"),
    "gptq": (_written(test_gptq.ENTRY, stored_forms.gptq(4, 16, 1)), f"{MODULE}.scales"),
    "fp8 by block": (
        _written(test_fp8.ENTRY, stored_forms.block_fp8(tuple(test_fp8.ENTRY["weight_block_size"]))),
        f"{MODULE}.weight_scale_inv",
    ),
    "W8A8": (_written(*_INTEGERS["W8A8"]), f"{MODULE}.weight_scale"),
    "W8A8 by tensor": (_written(*_INTEGERS["W8A8 by tensor"]), f"{MODULE}.weight_scale"),
    "W4A16": (_written(*_INTEGERS["W4A16"]), f"{MODULE}.weight_scale"),
    "FP8 by row": (_copied("glm4v_moe_fp8"), "model.language_model.layers.0.mlp.gate_proj.weight_scale"),
    "nvfp4": (test_nvfp4.write, f"{MODULE}.weight_scale"),
    "NF4": (_written(test_bitsandbytes.FOUR, stored_forms.blocks_of_codes(64)), f"{MODULE}.weight.absmax"),
    "int8 of bitsandbytes": (_written(test_bitsandbytes.EIGHT, stored_forms.eight_bit_rows()), f"{MODULE}.SCB"),
    "torchao": (lambda path: test_torchao.write(path, "4 bits in int8"), f"{MODULE}._weight_scale"),
    "mxfp4": (_copied("gpt_oss"), "model.layers.1.mlp.experts.gate_up_proj_scales"),
}
# Those that a CPU keeps in their bits, where nothing looks at dequantized weights.
KEPT = ("awq", "gptq", "W8A8", "W4A16", "int8 of bitsandbytes", "torchao")


def change(path: Path, scales: str, value: Callable[[Tensor], Tensor]) -> None:
    file = path / "model.safetensors"
    with safe_open(file, framework="pt") as opened:
        told = opened.metadata()
    weights = load_file(file)
    save_file(weights | {scales: value(weights[scales])}, file, metadata=told)


@pytest.mark.parametrize("name", FORMS)
def test_scales_that_are_all_zero_are_refused(name: str, tmp_path: Path) -> None:
    make, scales = FORMS[name]
    make(tmp_path)
    load(tmp_path)
    change(tmp_path, scales, torch.zeros_like)
    with pytest.raises(ModelError, match=f"'{scales}' holds nothing but zeros") as caught:
        load(tmp_path)
    assert "etch the checkpoint again" in str(caught.value)


def test_a_group_of_zeros_may_have_a_scale_of_zero(tmp_path: Path) -> None:
    make, scales = FORMS["awq"]
    make(tmp_path)

    def first_row(values: Tensor) -> Tensor:
        return torch.cat([torch.zeros_like(values[:1]), values[1:]])

    change(tmp_path, scales, first_row)
    weight = dict(load(tmp_path).named_parameters())[f"{MODULE}.weight"]
    assert not weight[:, :16].any()
    assert weight[:, 16:].any()


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_kept_weights_whose_scales_are_no_numbers_are_refused_by_name(name: str, value: float, tmp_path: Path) -> None:
    make, scales = FORMS[name]
    make(tmp_path)

    def with_one(values: Tensor) -> Tensor:
        return values.flatten().index_fill(0, torch.tensor([3]), value).view(values.shape)

    change(tmp_path, scales, with_one)
    with pytest.raises(ModelError, match=rf"scales of '{MODULE}.weight' hold NaN or infinity") as caught:
        load(tmp_path, "auto")
    assert "Fetch the checkpoint again" in str(caught.value)


def test_an_expert_that_no_test_asks_is_looked_at(tmp_path: Path) -> None:
    """A text of the engine's own test does not reach all experts, and requests would fail later."""
    source = tiny.checkpoint("glm4v_moe")
    stored_forms.write(source, tmp_path, test_awq.ENTRY, stored_forms.awq(16), "lm_head|visual")
    expert = "model.language_model.layers.1.mlp.experts.3.down_proj"
    change(tmp_path, f"{expert}.scales", lambda values: torch.full_like(values, float("nan")))
    with pytest.raises(ModelError, match=rf"scales of '{expert}.weight' hold NaN or infinity"):
        load(tmp_path, "bfloat16")


@pytest.mark.parametrize("whole", [True, False], ids=["bytes", "scales"])
def test_a_tensor_of_a_gguf_file_that_is_zero_is_refused(
    whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A download that made room for the file first, and ended early, leaves such tensors."""
    monkeypatch.setenv("BEHELD_GGUF_CACHE", str(tmp_path / "cache"))
    file = tiny_gguf.write(tiny.checkpoint("qwen2"), tmp_path / "a.gguf", Kind.Q8_0)
    stored = read_header(file).tensors["blk.1.ffn_gate.weight"]
    data = bytearray(file.read_bytes())
    # A block begins with its scale, of two bytes.
    size = gguf.GGML_QUANT_SIZES[Kind.Q8_0][1]
    for start in range(stored.start, stored.start + stored.num_bytes, size):
        length = size if whole else 2
        data[start : start + length] = bytes(length)
    file.write_bytes(data)
    with pytest.raises(ModelError, match=r"a\.gguf: the tensor 'blk\.1\.ffn_gate\.weight' holds nothing but zeros"):
        LLM(str(file), device="cpu")
