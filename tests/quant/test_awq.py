"""AWQ checkpoints mean what their numbers, zero points and scales say."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from beheld.core.errors import ModelError
from beheld.quant.awq import make
from beheld.quant.method import StorageTarget
from tests import tiny
from tests.quant import stored_forms
from tests.quant.test_compressed_tensors import load, restate, rewrite, same
from tests.quant.test_method import answers

QUERY = "model.layers.0.self_attn.q_proj"
ENTRY = {"bits": 4, "group_size": 16, "quant_method": "awq", "version": "gemm", "zero_point": True}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("awq")
    entry = ENTRY | {"modules_to_not_convert": ["model.layers.1.mlp.down_proj"]}
    stored_forms.write(tiny.checkpoint("qwen2"), path, entry, stored_forms.awq(16), r"1\.mlp\.down_proj")
    return path


@pytest.fixture
def copied(dense: Path, tmp_path: Path) -> Path:
    shutil.copytree(dense, tmp_path / "copied")
    return tmp_path / "copied"


def test_answers_are_those_of_the_numbers_that_are_meant(dense: Path) -> None:
    weights = load_file(dense / "model.safetensors")
    assert weights[f"{QUERY}.qweight"].shape == (64, 8)
    assert weights["model.layers.1.mlp.down_proj.weight"].dtype == torch.bfloat16
    assert answers(dense) == answers(dense / "plain")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_towers_and_experts_stored_one_by_one(tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEHELD_KEEP_BITS", "0")
    stored_forms.write(tiny.checkpoint("glm4v_moe"), tmp_path, ENTRY, stored_forms.awq(16))
    same(tmp_path, dtype)


def test_one_group_for_all_inputs(tmp_path: Path) -> None:
    stored_forms.write(tiny.checkpoint("qwen2"), tmp_path, ENTRY | {"group_size": -1}, stored_forms.awq(-1))
    same(tmp_path, "float32")


def test_auto_round_packs_so(tmp_path: Path) -> None:
    entry = {"bits": 4, "group_size": 16, "packing_format": "auto_round:auto_awq", "quant_method": "auto-round"}
    stored_forms.write(tiny.checkpoint("qwen2"), tmp_path, entry, stored_forms.awq(16))
    same(tmp_path, "float32")


def test_a_word_by_the_layout(copied: Path) -> None:
    """Outputs 0 to 7 of a word 0x76543210 are its places 0 4 1 5 2 6 3 7; zero points and scales are one."""
    words, ones = torch.full((64, 8), 0x76543210, dtype=torch.int32), torch.full((4, 8), 0x11111111, dtype=torch.int32)
    rewrite(
        copied,
        lambda weights: weights.update(
            {f"{QUERY}.qweight": words, f"{QUERY}.qzeros": ones, f"{QUERY}.scales": torch.ones(4, 64)}
        ),
    )
    method = make(ENTRY, StorageTarget("cpu", torch.float32))
    found = (method.weights(copied) or {})[f"{QUERY}.weight"][...]
    assert torch.equal(found, torch.tensor([0, 4, 1, 5, 2, 6, 3, 7] * 8).sub(1).float().unsqueeze(1).expand(64, 64))


BROKEN: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no scales": (lambda w: w.pop(f"{QUERY}.scales"), f"model.safetensors: '{QUERY}.qweight' has no '{QUERY}.scales'"),
    "no zeros": (lambda w: w.pop(f"{QUERY}.qzeros"), f"has no '{QUERY}.qzeros'"),
    "no numbers": (lambda w: w.pop(f"{QUERY}.qweight"), f"'{QUERY}.(qzeros|scales)' has no '{QUERY}.qweight'"),
    "scales": (lambda w: w.update({f"{QUERY}.scales": torch.ones(2, 64)}), r"\[2, 64\]; expected \[4, 64\]"),
    "zeros": (lambda w: w.update({f"{QUERY}.qzeros": torch.ones(4, 64).int()}), r"\[4, 64\]; expected \[4, 8\]"),
    "type": (lambda w: w.update({f"{QUERY}.qweight": w[f"{QUERY}.qweight"].long()}), "type I64; expected I32"),
    "dimensions": (lambda w: w.update({f"{QUERY}.qweight": torch.ones(8).int()}), "expected two dimensions"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_files_that_do_not_fit_are_refused(copied: Path, name: str) -> None:
    change, reason = BROKEN[name]
    rewrite(copied, change)
    with pytest.raises(ModelError, match=reason) as caught:
        load(copied)
    assert "Fetch the checkpoint again" in str(caught.value)


UNFIT = {
    36: "has 96 inputs, which are no multiple of the group size 36",
    32: r"has the shape \[6, 64\]; expected \[3, 64\]",
}


@pytest.mark.parametrize("size", UNFIT)
def test_another_group_size_than_stated_is_refused(copied: Path, size: int) -> None:
    restate(copied, lambda config: config["quantization_config"].update(group_size=size))
    with pytest.raises(ModelError, match=UNFIT[size]):
        load(copied)


def test_another_shape_than_the_model_has_is_refused(copied: Path) -> None:
    def change(weights: dict[str, Any]) -> None:
        weights |= {f"{QUERY}.{part}": weights[f"{QUERY}.{part}"][:, ::2].clone() for part in ("qweight", "scales")}
        weights[f"{QUERY}.qzeros"] = weights[f"{QUERY}.qzeros"][:, ::2].clone()

    rewrite(copied, change)
    with pytest.raises(ModelError, match="could not be loaded"):
        load(copied)


def test_plain_weights_are_refused(tmp_path: Path) -> None:
    shutil.copytree(tiny.checkpoint("qwen2"), tmp_path / "copied")
    restate(tmp_path / "copied", lambda config: config.update(quantization_config=ENTRY))
    with pytest.raises(ModelError, match="none of the weights is AWQ"):
        load(tmp_path / "copied")


UNBUILT: dict[str, dict[str, Any]] = {
    "8 bits": {"bits": 8},
    "layout 'gemv'": {"version": "GEMV"},
    "without zero points": {"zero_point": False},
    "group_size 0": {"group_size": 0},
}


@pytest.mark.parametrize("reason", UNBUILT)
def test_another_form_is_refused_by_name(reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        make(ENTRY | UNBUILT[reason], StorageTarget("cpu", torch.float32))
