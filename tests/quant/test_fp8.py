"""FP8 checkpoints with scales by block or by weight mean what their numbers and scales say."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from beheld.core.errors import ModelError
from beheld.quant.fp8 import make, open_weights
from beheld.quant.method import StorageTarget
from tests import tiny
from tests.quant import stored_forms
from tests.quant.test_compressed_tensors import load, restate, rewrite, same
from tests.quant.test_method import answers

QUERY = "model.layers.0.self_attn.q_proj.weight"
# No size of the tiny models is a multiple of both.
BLOCKS = (24, 40)
ENTRY = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": list(BLOCKS)}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fp8")
    entry = ENTRY | {"modules_to_not_convert": ["lm_head", "model.layers.1.mlp.down_proj"]}
    stored_forms.write(tiny.checkpoint("qwen2"), path, entry, stored_forms.block_fp8(BLOCKS), r"1\.mlp\.down_proj")
    return path


@pytest.fixture
def copied(dense: Path, tmp_path: Path) -> Path:
    shutil.copytree(dense, tmp_path / "copied")
    return tmp_path / "copied"


def test_answers_are_those_of_the_numbers_that_are_meant(dense: Path) -> None:
    weights = load_file(dense / "model.safetensors")
    assert weights[QUERY].dtype == torch.float8_e4m3fn
    assert weights["model.layers.1.mlp.down_proj.weight"].dtype == torch.bfloat16
    assert answers(dense) == answers(dense / "plain")


def test_latent_attention(tmp_path: Path) -> None:
    stored_forms.write(tiny.checkpoint("deepseek_v3"), tmp_path, ENTRY, stored_forms.block_fp8(BLOCKS))
    assert answers(tmp_path) == answers(tmp_path / "plain")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_towers_and_experts_stored_one_by_one(tmp_path: Path, dtype: str) -> None:
    stored_forms.write(tiny.checkpoint("glm4v_moe"), tmp_path, ENTRY, stored_forms.block_fp8(BLOCKS))
    same(tmp_path, dtype)


@pytest.mark.parametrize("suffix", ["weight_scale", "weight_scale_inv"])
def test_one_scale_for_a_whole_weight(tmp_path: Path, suffix: str) -> None:
    entry = {"quant_method": "fp8", "activation_scheme": "static"}
    stored_forms.write(tiny.checkpoint("qwen2"), tmp_path, entry, stored_forms.block_fp8(None, suffix))
    rewrite(tmp_path, lambda weights: weights.update({QUERY.replace("weight", "input_scale"): torch.ones(())}))
    same(tmp_path, "float32")


def test_merged_experts_and_edges_of_blocks_of_the_usual_size(tmp_path: Path) -> None:
    weight = torch.randn(2, 200, 300).to(torch.float8_e4m3fn)
    scale = torch.rand(2, 2, 3)
    save_file({"experts.down_proj": weight, "experts.down_proj_scale_inv": scale}, tmp_path / "model.safetensors")
    found = open_weights(tmp_path, (128, 128), "cpu")
    assert list(found) == ["experts.down_proj"]
    want = weight.float()
    for expert in range(2):
        for row in range(200):
            for column in range(0, 300, 4):
                part = want[expert, row, column : column + 4]
                part *= scale[expert, row // 128, column // 128]
    assert torch.equal(found["experts.down_proj"][...], want)
    assert torch.equal(found["experts.down_proj"][1:, 3:5], want[1:, 3:5])


def test_scales_that_are_exponents_alone(copied: Path) -> None:
    numbers = load_file(copied / "model.safetensors")[QUERY].float()
    exponents = torch.full((3, 2), 0.25).to(torch.float8_e8m0fnu)
    rewrite(copied, lambda weights: weights.update({f"{QUERY}_scale_inv": exponents}))
    assert torch.equal(open_weights(copied, BLOCKS, "cpu")[QUERY][...], numbers * 0.25)


def test_scales_of_keys_and_values_are_left_out(copied: Path) -> None:
    attention = QUERY.removesuffix("q_proj.weight")
    scales = {attention + name: torch.ones(1) for name in ("k_proj.k_scale", "v_proj.v_scale", "kv_scale")}
    rewrite(copied, lambda weights: weights.update(scales))
    restate(copied, lambda config: config["quantization_config"].update(kv_cache_scheme="static"))
    assert answers(copied) == answers(copied / "plain")
    found = make(ENTRY | {"kv_cache_scheme": "static"}, StorageTarget("cpu", torch.float32)).weights(copied)
    assert found is not None
    assert not scales.keys() & found.keys()


SCALE = f"{QUERY}_scale_inv"
BROKEN: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no scale": (lambda weights: weights.pop(SCALE), f"model.safetensors: '{QUERY}' is FP8 and has no '{SCALE}'"),
    "no weight": (lambda weights: weights.pop(QUERY), "the scale of a weight that is not FP8"),
    "other blocks": (lambda weights: weights.update({SCALE: torch.ones(2, 1)}), r"shape \[2, 1\]; expected \[3, 2\]"),
    "type": (lambda weights: weights.update({SCALE: torch.ones(3, 2).int()}), "type I32; expected F16"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_files_that_do_not_fit_are_refused(copied: Path, name: str) -> None:
    change, reason = BROKEN[name]
    rewrite(copied, change)
    with pytest.raises(ModelError, match=reason) as caught:
        load(copied)
    assert "Fetch the checkpoint again" in str(caught.value)


def test_plain_weights_are_refused(tmp_path: Path) -> None:
    shutil.copytree(tiny.checkpoint("qwen2"), tmp_path / "copied")
    restate(tmp_path / "copied", lambda config: config.update(quantization_config=ENTRY))
    with pytest.raises(ModelError, match="none of the weights is FP8"):
        load(tmp_path / "copied")


UNBUILT: dict[str, dict[str, Any]] = {
    "weight_block_size": {"weight_block_size": [128]},
    "'e5m2'": {"fmt": "e5m2"},
}


@pytest.mark.parametrize("reason", UNBUILT)
def test_another_form_is_refused_by_name(reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        make(ENTRY | UNBUILT[reason], StorageTarget("cpu", torch.float32))
