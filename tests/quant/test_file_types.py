"""Weights of a checkpoint stored in another type than the model's: mapped, then rounded or cast one by one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from beheld.platform import host
from beheld.platform.registry import CPU
from beheld.quant import file_types
from beheld.quant.byte_products import PackedWeights
from beheld.quant.grouped_linear import GroupedLinear
from beheld.quant.listed_experts import ListedExperts
from tests import tiny
from tests.quant.test_compressed_tensors import load


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint stored in float32, with numbers that bfloat16 does not hold."""
    made = tmp_path_factory.mktemp("float32") / "checkpoint"
    shutil.copytree(tiny.checkpoint("qwen2_vl"), made)
    torch.manual_seed(0)
    weights = {name: each.float() for name, each in load_file(made / "model.safetensors").items()}
    weights = {name: each * (1 + 0.002 * torch.rand_like(each)) for name, each in weights.items()}
    save_file(weights, made / "model.safetensors", metadata={"format": "pt"})
    return made


def mapped(parameter: nn.Parameter) -> bool:
    address = parameter.data_ptr()
    return any(start <= address < stop for start, stop in host._file_maps())


@pytest.fixture
def before(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """The parameters of another type than bfloat16 that a loaded model has before they are cast, and whether each lies
    in the file."""
    seen: dict[str, bool] = {}
    real = file_types.cast

    def cast(model: nn.Module, dtype: torch.dtype) -> None:
        seen.update((name, mapped(each)) for name, each in model.named_parameters() if each.dtype == torch.float32)
        real(model, dtype)

    monkeypatch.setattr(file_types, "cast", cast)
    return seen


def test_a_float32_file_is_cast_weight_by_weight(path: Path, before: dict[str, bool]) -> None:
    stored = load_file(path / "model.safetensors")
    model = load(path, "bfloat16")
    assert any("embed_tokens" in name for name in before)
    assert sum("_proj.weight" in name for name in before) > 10
    # The loader copied none of them: at once they would be held twice.
    assert all(before.values()), before
    assert {each.dtype for each in model.parameters()} == {torch.bfloat16}
    embedding = next(value for name, value in stored.items() if name.endswith("embed_tokens.weight"))
    assert torch.equal(model.get_input_embeddings().weight, embedding.bfloat16())
    assert not any(file_types._NAMES in vars(module) for module in model.modules())


@pytest.mark.skipif(CPU.no_grouped_products is not None, reason=str(CPU.no_grouped_products))
def test_weights_are_rounded_from_the_numbers_of_the_file(path: Path, before: dict[str, bool]) -> None:
    model = load(path, "bfloat16", quantization="int4")
    layers = {name: each for name, each in model.named_modules() if isinstance(each, GroupedLinear)}
    # What is rounded is not cast before.
    assert layers
    assert all(before.values())
    assert not any(f"{name}.weight" in before for name in layers)
    assert {each.weight.dtype for each in layers.values()} == {torch.bfloat16}
    stored = load_file(path / "model.safetensors")
    for name in ("layers.0.mlp.down_proj", "layers.1.self_attn.o_proj"):
        weight_NK = next(value for key, value in stored.items() if key.endswith(f"{name}.weight"))
        layer = next(each for key, each in layers.items() if key.endswith(name))
        wanted = PackedWeights.rounded(weight_NK, 4, weight_NK.shape[1] // layer.form.groups)
        assert torch.equal(layer._weights.packed, wanted.packed)
        assert torch.equal(layer._weights.scales_BG2L, wanted.scales_BG2L)


def test_what_a_model_keeps_in_float32_stays_so() -> None:
    class Own(nn.Module):
        _keep_in_fp32_modules_strict = ("gate.weight",)

        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(64, 64, dtype=torch.bfloat16, device="meta")
            self.up = nn.Linear(64, 64, dtype=torch.bfloat16, device="meta")
            self.tied = nn.Embedding(64, 64, dtype=torch.bfloat16, device="meta")
            self.tied.weight = self.up.weight
            self.router = nn.Linear(64, 64, dtype=torch.float32, device="meta")

    made: Any = file_types.keeping(Own, {(64, 64): torch.float32}, torch.bfloat16)()
    assert (made.gate.weight.dtype, made.up.weight.dtype) == (torch.bfloat16, torch.float32)
    assert made.tied.weight is made.up.weight
    assert file_types.has_type(made.up, torch.bfloat16)
    for module in (made.gate, made.up, made.router):
        module.weight = nn.Parameter(torch.ones(64, 64), requires_grad=False)
    made.tied.weight = made.up.weight
    file_types.cast(made, torch.bfloat16)
    assert (made.gate.weight.dtype, made.router.weight.dtype) == (torch.float32, torch.float32)
    assert made.up.weight.dtype == torch.bfloat16
    assert made.tied.weight is made.up.weight


def test_shapes_of_several_types_are_left_to_the_loader(tmp_path: Path) -> None:
    save_file(
        {"a": torch.zeros(2, 3), "b": torch.zeros(2, 3, dtype=torch.float16), "c": torch.zeros(4, 3),
         "d": torch.zeros(5), "e": torch.zeros(6, 3, dtype=torch.bfloat16), "f": torch.zeros(7, 3, dtype=torch.int8)},
        tmp_path / "model.safetensors",
    )  # fmt: skip
    assert file_types.type_by_shape(tmp_path, torch.bfloat16) == {(4, 3): torch.float32}


def test_what_the_loader_makes_of_one_entry_has_the_type_of_the_model() -> None:
    """Keys and values have a shape that no entry has, and the loader gives them the type of queries."""
    model = load(tiny.checkpoint("molmo"), "float32")
    assert {each.dtype for each in model.parameters()} == {torch.float32}


@pytest.mark.skipif(CPU.no_grouped_products is not None, reason=str(CPU.no_grouped_products))
def test_rounded_experts_leave_a_module_without_weights() -> None:
    model = load(tiny.checkpoint("qwen3_vl_moe"), "float32", quantization="int4")
    assert any(isinstance(module, ListedExperts) for module in model.modules())
    assert {each.dtype for each in model.parameters()} == {torch.float32}
