"""bitsandbytes checkpoints mean what their codes, maps and scales say."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from beheld.core.errors import ModelError
from beheld.quant.bitsandbytes import make
from beheld.quant.method import StorageTarget
from tests import tiny
from tests.quant import stored_forms
from tests.quant.test_compressed_tensors import load, restate, rewrite, same
from tests.quant.test_method import answers

QUERY = "model.layers.0.self_attn.q_proj"
STATE = f"{QUERY}.weight.quant_state.bitsandbytes__nf4"
FOUR = {"load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4", "quant_method": "bitsandbytes"}
EIGHT = {"_load_in_8bit": True, "load_in_8bit": True, "llm_int8_threshold": 6.0, "quant_method": "bitsandbytes"}
# As bitsandbytes does by default.
SPARED = "lm_head"


@pytest.fixture(scope="module")
def fours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("nf4")
    stored_forms.write(tiny.checkpoint("qwen2"), path, FOUR, stored_forms.blocks_of_codes(64), SPARED)
    return path


@pytest.fixture(scope="module")
def eights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("int8")
    stored_forms.write(tiny.checkpoint("qwen2"), path, EIGHT, stored_forms.eight_bit_rows(), SPARED)
    return path


def test_answers_are_those_of_the_numbers_that_are_meant(fours: Path, eights: Path) -> None:
    weights = load_file(fours / "model.safetensors")
    assert weights[f"{QUERY}.weight"].shape == (2048, 1)
    assert weights["model.embed_tokens.weight"].dtype == torch.bfloat16
    assert answers(fours) == answers(fours / "plain")
    assert load_file(eights / "model.safetensors")[f"{QUERY}.weight"].dtype == torch.int8
    assert answers(eights) == answers(eights / "plain")


def test_fp4(tmp_path: Path) -> None:
    form = stored_forms.blocks_of_codes(64, kind="fp4")
    stored_forms.write(tiny.checkpoint("qwen2"), tmp_path, FOUR | {"bnb_4bit_quant_type": "fp4"}, form, SPARED)
    assert f"{QUERY}.weight.quant_state.bitsandbytes__fp4" in load_file(tmp_path / "model.safetensors")
    same(tmp_path, "float32")
    assert answers(tmp_path) == answers(tmp_path / "plain")


def test_scales_that_are_quantized_and_codes_in_another_type(tmp_path: Path) -> None:
    """Blocks of 64 cross the rows of 96 inputs; the last block of scales is a part of one."""
    form = stored_forms.blocks_of_codes(64, 40, torch.bfloat16)
    stored_forms.write(tiny.checkpoint("qwen2"), tmp_path, FOUR, form, SPARED)
    same(tmp_path, "float32")


def test_towers_and_experts_stored_one_by_one(tmp_path: Path) -> None:
    stored_forms.write(tiny.checkpoint("glm4v_moe"), tmp_path, FOUR, stored_forms.blocks_of_codes(64), SPARED)
    same(tmp_path, "bfloat16")


def test_bytes_by_the_layout(fours: Path, tmp_path: Path) -> None:
    """A byte 0x27 is the numbers of code 2 and code 7, in this order; a block's scale counts for all of it."""
    path = Path(shutil.copytree(fours, tmp_path / "copied"))
    scales = torch.arange(64.0)
    codes, numbers = torch.full((2048, 1), 0x27, dtype=torch.uint8), torch.arange(16.0) / 16
    rewrite(
        path,
        lambda weights: weights.update(
            {
                f"{QUERY}.weight": codes,
                f"{QUERY}.weight.quant_map": numbers,
                f"{QUERY}.weight.absmax": scales,
            }
        ),
    )
    found = (make(FOUR, StorageTarget("cpu", torch.float32)).weights(path) or {})[f"{QUERY}.weight"][...]
    assert torch.equal(found, torch.tensor([2 / 16, 7 / 16] * 32) * scales.unsqueeze(1))


def test_rows_of_eight_bits_are_kept(eights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers that are kept are those that are dequantized."""
    method = make(EIGHT, StorageTarget("cpu", torch.bfloat16))
    lazy = (method.weights(eights) or {})[f"{QUERY}.weight"]
    numbers, scale, low = lazy.fields()
    kept = numbers.float().unflatten(1, (lazy.form.groups, -1)) * scale.unsqueeze(-1) + low.unsqueeze(-1)
    torch.testing.assert_close(kept.flatten(1), lazy[...], rtol=0, atol=1e-6)


def stated(**changes: Any) -> Callable[[dict[str, Any]], None]:
    """A change of what the state of a weight says."""

    def change(weights: dict[str, Any]) -> None:
        said = json.loads(bytes(weights[STATE].tolist())) | changes
        weights[STATE] = torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)

    return change


BROKEN: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no map": (lambda w: w.pop(f"{QUERY}.weight.quant_map"), f"has no '{QUERY}.weight.quant_map'"),
    "no scales": (lambda w: w.pop(f"{QUERY}.weight.absmax"), f"has no '{QUERY}.weight.absmax'"),
    "no codes": (lambda w: w.pop(f"{QUERY}.weight"), f"has no '{QUERY}.weight'"),
    "no state": (lambda w: w.pop(STATE), "belongs to no weight of 4 bits"),
    "scales": (lambda w: w.update({f"{QUERY}.weight.absmax": torch.ones(63)}), r"\[63\]; expected \[64\]"),
    "codes": (lambda w: w.update({f"{QUERY}.weight": w[f"{QUERY}.weight"][:-1]}), r"\[2047, 1\]; expected \[2048, 1\]"),
    "type": (lambda w: w.update({f"{QUERY}.weight": w[f"{QUERY}.weight"].long()}), "type I64; expected U8"),
    "broken state": (lambda w: w.update({STATE: w[STATE][:-1]}), "is not valid JSON"),
    "shape": (stated(shape=[64]), r"states the shape \[64\]"),
    "block": (stated(blocksize=0), "expected positive whole numbers"),
    "nested": (stated(nested_blocksize=256), f"has no '{QUERY}.weight.nested_absmax'"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_files_that_do_not_fit_are_refused(fours: Path, tmp_path: Path, name: str) -> None:
    change, reason = BROKEN[name]
    path = Path(shutil.copytree(fours, tmp_path / "copied"))
    rewrite(path, change)
    with pytest.raises(ModelError, match=reason) as caught:
        load(path)
    assert "Fetch the checkpoint again" in str(caught.value)


BROKEN_ROWS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no scales": (lambda w: w.pop(f"{QUERY}.SCB"), f"'{QUERY}.weight' has no '{QUERY}.SCB'"),
    "no numbers": (lambda w: w.pop(f"{QUERY}.weight"), f"has no '{QUERY}.weight'"),
    "scales": (lambda w: w.update({f"{QUERY}.SCB": torch.ones(32)}), r"\[32\]; expected \[64\]"),
    "tiles": (lambda w: w.update({f"{QUERY}.weight_format": torch.tensor(2, dtype=torch.uint8)}), "stored in tiles"),
}


@pytest.mark.parametrize("name", BROKEN_ROWS)
def test_rows_that_do_not_fit_are_refused(eights: Path, tmp_path: Path, name: str) -> None:
    change, reason = BROKEN_ROWS[name]
    path = Path(shutil.copytree(eights, tmp_path / "copied"))
    rewrite(path, change)
    with pytest.raises(ModelError, match=reason):
        load(path)


@pytest.mark.parametrize("entry", [FOUR, EIGHT], ids=["4", "8"])
def test_plain_weights_are_refused(tmp_path: Path, entry: dict[str, Any]) -> None:
    path = Path(shutil.copytree(tiny.checkpoint("qwen2"), tmp_path / "copied"))
    restate(path, lambda config: config.update(quantization_config=entry))
    with pytest.raises(ModelError, match="none of the weights is so"):
        load(path)


@pytest.mark.parametrize("entry", [{"load_in_4bit": False}, {"load_in_4bit": True, "load_in_8bit": True}])
def test_what_states_no_number_of_bits_is_refused(entry: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="load_in_4bit"):
        make(entry, StorageTarget("cpu", torch.float32))
