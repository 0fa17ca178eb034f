"""Whole numbers, FP8 by blocks and mixed schemes of compressed-tensors mean what they say."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from beheld.core.errors import ModelError
from beheld.quant.compressed_schemes import schemes_of
from beheld.quant.compressed_tensors import make, open_weights
from beheld.quant.method import StorageTarget
from tests import tiny
from tests.quant import stored_forms
from tests.quant.stored_forms import Form, block_fp8, whole_numbers
from tests.quant.test_compressed_tensors import load, restate, rewrite, same
from tests.quant.test_method import answers

QUERY = "model.layers.0.self_attn.q_proj"
BLOCKS = (24, 40)


def group(bits: int, strategy: str, form: str | None = None, **own: Any) -> dict[str, Any]:
    """A group of modules whose weights are stored in a scheme."""
    weights = {"actorder": None, "dynamic": False, "group_size": None, "block_structure": None, "symmetric": True}
    weights |= {"num_bits": bits, "strategy": strategy, "type": "int", **own}
    return {"format": form, "input_activations": None, "targets": ["Linear"], "weights": weights}


def stated(form: str, *groups: dict[str, Any], **own: Any) -> dict[str, Any]:
    """The entry `quantization_config`."""
    return {
        "config_groups": {f"group_{place}": each for place, each in enumerate(groups)},
        "format": form,
        "ignore": ["lm_head", "re:.*layers.1.mlp.down_proj"],
        "quant_method": "compressed-tensors",
        **own,
    }


BY_GROUP: dict[str, Any] = {"group_size": 16}
FORMS: dict[str, tuple[dict[str, Any], Form]] = {
    "W8A8": (stated("int-quantized", group(8, "channel")), whole_numbers(8, None, packed=False)),
    "W8A8 by tensor": (stated("int-quantized", group(8, "tensor")), whole_numbers(8, None, packed=False, one=True)),
    "W8A8 with zeros": (
        stated("int-quantized", group(8, "channel", symmetric=False)),
        whole_numbers(8, None, packed=False, zeros=True),
    ),
    "int8 by group": (stated("naive-quantized", group(8, "group", **BY_GROUP)), whole_numbers(8, 16, packed=False)),
    "W4A16": (stated("pack-quantized", group(4, "group", **BY_GROUP)), whole_numbers(4, 16, packed=True)),
    "W4A16 with zeros": (
        stated("pack-quantized", group(4, "group", symmetric=False, **BY_GROUP)),
        whole_numbers(4, 16, packed=True, zeros=True),
    ),
    "W4A16 act-order": (
        stated("pack-quantized", group(4, "group", actorder="group", **BY_GROUP)),
        whole_numbers(4, 16, packed=True, act_order=True),
    ),
    "W4A16 act-order with zeros": (
        stated("pack-quantized", group(4, "group", actorder="group", symmetric=False, **BY_GROUP)),
        whole_numbers(4, 16, packed=True, zeros=True, act_order=True),
    ),
    "W4A16 by channel": (
        stated("pack-quantized", group(4, "channel", symmetric=False)),
        whole_numbers(4, None, packed=True, zeros=True),
    ),
    "W8A16": (stated("pack-quantized", group(8, "channel")), whole_numbers(8, None, packed=True)),
    "W8A16 with zeros": (
        stated("pack-quantized", group(8, "group", symmetric=False, **BY_GROUP)),
        whole_numbers(8, 16, packed=True, zeros=True),
    ),
    "FP8 by block": (
        stated("float-quantized", group(8, "block", type="float", block_structure=list(BLOCKS))),
        block_fp8(BLOCKS, "weight_scale"),
    ),
}
SPARED = r"lm_head|1\.mlp\.down_proj"


@pytest.mark.parametrize("name", FORMS)
def test_weights_are_those_meant(tmp_path: Path, name: str) -> None:
    entry, form = FORMS[name]
    stored_forms.write(tiny.checkpoint("qwen2"), tmp_path, entry, form, SPARED)
    assert load_file(tmp_path / "model.safetensors")["model.layers.1.mlp.down_proj.weight"].dtype == torch.bfloat16
    same(tmp_path, "float32")


@pytest.mark.parametrize("name", ["W8A8", "W4A16 act-order with zeros", "FP8 by block"])
def test_towers_and_experts_stored_one_by_one(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEHELD_KEEP_BITS", "0")
    entry, form = FORMS[name]
    stored_forms.write(tiny.checkpoint("glm4v_moe"), tmp_path, entry, form, "lm_head")
    same(tmp_path, "bfloat16")


def by_name(weight: str, bits: int = 4) -> dict[str, Any]:
    """A scheme for modules by name."""
    return group(bits, "group", "pack-quantized", **BY_GROUP) | {"targets": [weight]}


MIXED = stated(
    "mixed-precision",
    by_name("re:.*self_attn.*"),
    group(8, "channel", "int-quantized") | {"targets": ["re:.*down_proj"]},
    group(8, "block", "float-quantized", type="float", block_structure=list(BLOCKS)),
    group(8, "tensor", "float-quantized", type="float") | {"targets": ["re:.*up_proj"]},
)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Attention of 4 bits, down_proj int8, up_proj FP8 with one scale, and gate_proj FP8 by block."""
    path = tmp_path_factory.mktemp("mixed")
    forms = [FORMS["W4A16"][1], FORMS["W8A8"][1], block_fp8(BLOCKS, "weight_scale"), block_fp8(None, "weight_scale")]
    parts = [r"self_attn", r"down_proj", r"gate_proj", r"up_proj"]
    for place, (form, own) in enumerate(zip(forms, parts, strict=True)):
        stored_forms.write(tiny.checkpoint("qwen2"), path / str(place), MIXED, form, rf"^(?!.*{own})")
    for inner in (".", "plain"):
        weights: dict[str, torch.Tensor] = {}
        for place, own in enumerate(parts):
            found = load_file(path / str(place) / inner / "model.safetensors")
            weights |= {name: value for name, value in found.items() if own in name or place == 0}
            if own != "self_attn":
                # What the first one holds plain.
                dropped = [name for name in weights if own in name and name not in found]
                weights = {name: value for name, value in weights.items() if name not in dropped}
        save_file(weights, path / "0" / inner / "model.safetensors", metadata={"format": "pt"})
    return path / "0"


@pytest.fixture
def copied(mixed: Path, tmp_path: Path) -> Path:
    shutil.copytree(mixed, tmp_path / "copied")
    return tmp_path / "copied"


def test_answers_of_mixed_schemes_are_those_of_the_numbers_that_are_meant(mixed: Path) -> None:
    kinds = {str(value.dtype) for value in load_file(mixed / "model.safetensors").values()}
    assert {"torch.int32", "torch.int8", "torch.float8_e4m3fn"} <= kinds
    assert answers(mixed) == answers(mixed / "plain")
    same(mixed, "float32")


def test_a_last_word_may_hold_fewer_numbers(tmp_path: Path) -> None:
    weight = np.random.default_rng(3).normal(size=(13, 27)).astype(np.float32)
    for bits in (4, 8):
        entry = stated("pack-quantized", group(bits, "channel", symmetric=False))
        parts, meant = whole_numbers(bits, None, packed=True, zeros=True)(weight, 0)
        stored = {f"layer.{name}": value.contiguous() for name, value in parts.items()}
        save_file(stored, tmp_path / "model.safetensors")
        found = open_weights(tmp_path, "cpu", schemes_of(entry))
        assert list(found) == ["layer.weight"]
        assert torch.equal(found["layer.weight"][...], torch.from_numpy(meant))
        assert torch.equal(found["layer.weight"][2:5, :3], torch.from_numpy(meant)[2:5, :3])


def test_old_symmetric_files_may_hold_zero_points(copied: Path) -> None:
    down = "model.layers.0.mlp.down_proj.weight"
    rewrite(copied, lambda w: w.update({f"{down}_zero_point": torch.zeros(64, 1, dtype=torch.int8)}))
    same(copied, "float32")


def test_without_products_nothing_is_kept() -> None:
    method = make(MIXED, StorageTarget("cpu", torch.bfloat16))
    assert method.objection is not None
    assert "FP8 weights are multiplied as stored if all" in method.objection
    assert method.converted == "its 4-bit and 8-bit and FP8 weights dequantized"


Q, D, G = QUERY, "model.layers.0.mlp.down_proj", "model.layers.0.mlp.gate_proj"
STATES = "fit none of the schemes that config.json states: 4-bit int by group of 16; 8-bit int by channel;"
BROKEN: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no scale": (lambda w: w.pop(f"{Q}.weight_scale"), f"model.safetensors: '{Q}.weight_packed' has no '{Q}.weight_sc"),
    "no shape": (lambda w: w.pop(f"{Q}.weight_shape"), f"has no '{Q}.weight_shape'"),
    "no numbers": (lambda w: w.pop(f"{Q}.weight_packed"), f"'{Q}.weight_(scale|shape)' is for a weight that is not"),
    "groups": (lambda w: w.update({f"{Q}.weight_scale": torch.ones(64, 2)}), STATES),
    "words": (lambda w: w.update({f"{Q}.weight_packed": torch.ones(64, 9).int()}), STATES),
    "shape": (lambda w: w.update({f"{Q}.weight_shape": torch.tensor([64, 0])}), STATES),
    "order": (
        lambda w: w.update({f"{Q}.weight_g_idx": torch.arange(64).int()}),
        "groups 0 to 63, but there are scales",
    ),
    "int8 scale": (lambda w: w.pop(f"{D}.weight_scale"), f"'{D}.weight' has no '{D}.weight_scale'"),
    "int8 scales": (lambda w: w.update({f"{D}.weight_scale": torch.ones(1, 96)}), STATES),
    "zeros": (
        lambda w: w.update({f"{D}.weight_zero_point": torch.ones(64, 2).char()}),
        r"shape \[64, 2\]; expected \[64, 1\]",
    ),
    "blocks": (lambda w: w.update({f"{G}.weight_scale": torch.ones(3, 2)}), r"shape \[3, 2\]; expected \[4, 2\]"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_files_that_do_not_fit_are_refused(copied: Path, name: str) -> None:
    change, reason = BROKEN[name]
    rewrite(copied, change)
    with pytest.raises(ModelError, match=reason) as caught:
        load(copied)
    assert "Fetch the checkpoint again" in str(caught.value)


def test_zero_points_that_are_stated_must_be_there(copied: Path) -> None:
    restate(copied, lambda c: c["quantization_config"]["config_groups"]["group_1"]["weights"].update(symmetric=False))
    with pytest.raises(ModelError, match=r"has no .*down_proj.weight_zero_point"):
        load(copied)


def test_fp8_that_is_not_stated_is_refused(copied: Path) -> None:
    restate(copied, lambda c: c.update(quantization_config=FORMS["W8A8"][0]))
    rewrite(copied, lambda w: [w.pop(name) for name in list(w) if "self_attn" in name or "down_proj" in name])
    with pytest.raises(ModelError, match=r"is FP8, but config\.json states 8-bit int by channel"):
        load(copied)


UNBUILT: dict[str, dict[str, Any]] = {
    "format 'marlin-24'": stated("marlin-24", group(4, "group", **BY_GROUP)),
    "format 'mixed-precision'": stated("mixed-precision", group(4, "group", **BY_GROUP)),
    "num_bits 2": stated("pack-quantized", group(2, "group", **BY_GROUP)),
    "type 'float'": stated("pack-quantized", group(8, "channel", type="float")),
    "group_size 0": stated("pack-quantized", group(4, "group", group_size=0)),
    "strategy 'tensor_group'": stated("pack-quantized", group(4, "tensor_group", **BY_GROUP)),
}


@pytest.mark.parametrize("reason", UNBUILT)
def test_another_form_is_refused_by_name(reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        make(UNBUILT[reason], StorageTarget("cpu", torch.float32))
