"""GPTQ checkpoints mean what their numbers, zero points, scales and orders of groups say."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from beheld.core.errors import ModelError
from beheld.quant import auto_round, gptq
from beheld.quant.integers import unpacked
from beheld.quant.method import StorageTarget
from tests import tiny
from tests.quant import stored_forms
from tests.quant.test_compressed_tensors import load, restate, rewrite, same
from tests.quant.test_method import answers

QUERY = "model.layers.0.self_attn.q_proj"
ENTRY = {"bits": 4, "desc_act": True, "group_size": 16, "quant_method": "gptq", "sym": False}
ROUND = {"bits": 4, "group_size": 16, "packing_format": "auto_round:auto_gptq", "quant_method": "auto-round"}


def write(path: Path, entry: dict[str, Any], less: int = 1, family: str = "qwen2", spared: str = "$^") -> Path:
    form = stored_forms.gptq(entry["bits"], entry["group_size"], less, act_order=entry.get("desc_act", False))
    stored_forms.write(tiny.checkpoint(family), path, entry, form, spared)
    return path


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gptq"), ENTRY, spared=r"1\.mlp\.down_proj")


@pytest.fixture
def copied(dense: Path, tmp_path: Path) -> Path:
    shutil.copytree(dense, tmp_path / "copied")
    return tmp_path / "copied"


def test_answers_are_those_of_the_numbers_that_are_meant(dense: Path) -> None:
    weights = load_file(dense / "model.safetensors")
    assert weights[f"{QUERY}.qweight"].shape == (8, 64)
    assert not torch.equal(weights[f"{QUERY}.g_idx"], weights[f"{QUERY}.g_idx"].sort().values)
    assert weights["model.layers.1.mlp.down_proj.weight"].dtype == torch.bfloat16
    assert answers(dense) == answers(dense / "plain")


@pytest.mark.parametrize("act_order", [False, True], ids=["in order", "act-order"])
@pytest.mark.parametrize(("layout", "less"), [("gptq", 1), ("gptq_v2", 0)])
@pytest.mark.parametrize("bits", gptq.BITS)
def test_bits_zero_points_and_orders(tmp_path: Path, bits: int, layout: str, less: int, act_order: bool) -> None:
    entry = ENTRY | {"bits": bits, "checkpoint_format": layout, "desc_act": act_order}
    same(write(tmp_path, entry, less), "float32")


# The last group may be shorter.
@pytest.mark.parametrize("size", [-1, 40])
@pytest.mark.parametrize("indexed", [False, True])
def test_sizes_of_groups(tmp_path: Path, size: int, indexed: bool) -> None:
    write(tmp_path, ENTRY | {"group_size": size, "desc_act": False})
    if not indexed:
        rewrite(tmp_path, lambda weights: [weights.pop(name) for name in list(weights) if name.endswith("g_idx")])
    same(tmp_path, "float32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_towers_and_experts_stored_one_by_one(tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEHELD_KEEP_BITS", "0")
    same(write(tmp_path, ENTRY, family="glm4v_moe"), dtype)


def test_auto_round_packs_so(tmp_path: Path) -> None:
    same(write(tmp_path, ROUND), "float32")


@pytest.mark.parametrize("method", ["gptq", "auto-round"])
def test_modules_of_other_bits_and_groups(tmp_path: Path, method: str) -> None:
    changed = {"bits": 8, "group_size": 32}
    entry = {
        "gptq": ENTRY | {"desc_act": False, "dynamic": {r"+:.*down_proj": changed, r"-:.*\.1\.self_attn": {}}},
        "auto-round": ROUND | {"extra_config": {"model.layers.0.mlp.down_proj": changed, "lm_head": {"bits": 16}}},
    }[method]
    write(tmp_path / "four", entry, spared=r"1\.self_attn|lm_head")
    write(tmp_path / "eight", entry | changed, spared=r"1\.self_attn|lm_head")
    for place in ("model.safetensors", "plain/model.safetensors"):
        eights = load_file(tmp_path / "eight" / place)
        four = load_file(tmp_path / "four" / place)
        mixed = {name: value for name, value in four.items() if "down_proj" not in name}
        mixed |= {name: value for name, value in eights.items() if "down_proj" in name}
        rewrite((tmp_path / "four" / place).parent, lambda w, new=mixed: (w.clear(), w.update(new)))
    assert load_file(tmp_path / "four" / "model.safetensors")["model.layers.0.mlp.down_proj.qweight"].shape == (24, 64)
    same(tmp_path / "four", "float32")


@pytest.mark.parametrize("bits", gptq.BITS)
def test_every_number_at_every_place_of_a_word(bits: int) -> None:
    """As one long number in binary."""
    numbers = torch.randint(0, 1 << bits, (96,), generator=torch.Generator().manual_seed(bits))
    whole = sum(int(number) << (bits * place) for place, number in enumerate(numbers))
    words = [(whole >> (32 * place)) & 0xFFFFFFFF for place in range(96 * bits // 32)]
    signed = torch.tensor([word - (1 << 32) if word >> 31 else word for word in words], dtype=torch.int32)
    assert torch.equal(unpacked(signed, bits, 0).long(), numbers)
    both = torch.stack([signed, torch.zeros_like(signed)], dim=1)
    assert torch.equal(unpacked(both, bits, 0).long(), torch.stack([numbers, torch.zeros_like(numbers)], dim=1))


GROUPS = torch.arange(64, dtype=torch.int32) // 16
UNFIT = r"do not fit 4 bits with the group size 16"
BROKEN: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no scales": (lambda w: w.pop(f"{QUERY}.scales"), f"model.safetensors: '{QUERY}.qweight' has no '{QUERY}.scales'"),
    "no zeros": (lambda w: w.pop(f"{QUERY}.qzeros"), f"has no '{QUERY}.qzeros'"),
    "no order": (lambda w: w.pop(f"{QUERY}.g_idx"), f"has no '{QUERY}.g_idx'"),
    "no numbers": (lambda w: w.pop(f"{QUERY}.qweight"), f"'{QUERY}.(qzeros|scales|g_idx)' has no '{QUERY}.qweight'"),
    "scales": (lambda w: w.update({f"{QUERY}.scales": torch.ones(2, 64)}), UNFIT),
    "zeros": (lambda w: w.update({f"{QUERY}.qzeros": torch.ones(4, 64).int()}), UNFIT),
    "dimensions": (lambda w: w.update({f"{QUERY}.qweight": torch.ones(64).int()}), UNFIT),
    "type": (lambda w: w.update({f"{QUERY}.qweight": w[f"{QUERY}.qweight"].long()}), "type I64; expected I32"),
    "order": (lambda w: w.update({f"{QUERY}.g_idx": GROUPS + 1}), "groups 1 to 4, but there are scales of 4 groups"),
    "length": (lambda w: w.update({f"{QUERY}.g_idx": GROUPS[:32].clone()}), r"shape \[32\]; expected \[64\]"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_files_that_do_not_fit_are_refused(copied: Path, name: str) -> None:
    change, reason = BROKEN[name]
    rewrite(copied, change)
    with pytest.raises(ModelError, match=reason) as caught:
        load(copied)
    assert "Fetch the checkpoint again" in str(caught.value)


@pytest.mark.parametrize("stated", [{"group_size": 32}, {"bits": 8}])
def test_what_is_stated_must_fit(copied: Path, stated: dict[str, Any]) -> None:
    restate(copied, lambda config: config["quantization_config"].update(stated))
    with pytest.raises(ModelError, match=re.escape("has the shape [12, 64], its scales [6, 64]")):
        load(copied)


def test_plain_weights_are_refused(tmp_path: Path) -> None:
    shutil.copytree(tiny.checkpoint("qwen2"), tmp_path / "copied")
    restate(tmp_path / "copied", lambda config: config.update(quantization_config=ENTRY))
    with pytest.raises(ModelError, match="none of the weights is GPTQ"):
        load(tmp_path / "copied")


UNBUILT: dict[str, dict[str, Any]] = {
    "of 5 bits": ENTRY | {"bits": 5},
    "of None bits": ENTRY | {"bits": None},
    "format 'marlin'": ENTRY | {"checkpoint_format": "marlin"},
    "group_size 0": ENTRY | {"group_size": 0},
    "packed as 'auto_round:other'": ROUND | {"packing_format": "auto_round:other"},
    "data_type 'mx_fp'": ROUND | {"data_type": "mx_fp"},
    "states others": ROUND | {"packing_format": "auto_round:auto_awq", "bits": 8},
}


@pytest.mark.parametrize("reason", UNBUILT)
def test_another_form_is_refused_by_name(reason: str) -> None:
    make = auto_round.make if UNBUILT[reason]["quant_method"] == "auto-round" else gptq.make
    with pytest.raises(ModelError, match=reason):
        make(UNBUILT[reason], StorageTarget("cpu", torch.float32))
