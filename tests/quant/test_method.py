"""A new method is one file: a toy one is loaded, joined, sharded, carries adapters and answers as its numbers mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from beheld import LLM, SamplingParams
from beheld.core.config import QUANTIZED_CHECKPOINTS
from beheld.core.errors import ModelError
from beheld.models.surgery.joined import FirstOfFused, fuse_linears
from beheld.models.surgery.operation import Changes
from beheld.models.surgery.parts import text_model
from beheld.platform.registry import CPU
from beheld.quant import registry
from beheld.quant.float8 import FP8, Float8Experts, Float8Linear, rounded_rows
from beheld.quant.int8 import Int8Linear
from beheld.quant.linear import StoredLinear, join, linear_of, part, same_form
from beheld.quant.method import StorageTarget
from tests import tiny
from tests.quant import toy_int8
from tests.quant.test_compressed_tensors import load
from tests.quant.toy_int8 import ToyLinear

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": [5 + (7 * n + 3 * m) % 80 for n in range(m)]} for m in (40, 3, 17)]


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(registry.METHODS, toy_int8.NAME, "tests.quant.toy_int8:make")
    toy_int8.quantize(tiny.checkpoint("qwen2"), tmp_path / "toy")
    return tmp_path / "toy"


def answers(path: Path, **options: Any) -> list[tuple[int, ...]]:
    with LLM(str(path), dtype="float32", seed=0, max_model_len=256, **options) as llm:
        return [tuple(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def test_weights_are_kept_as_they_are_stored(toy: Path) -> None:
    model, meant = load(toy), dict(load(toy / "plain").named_parameters())
    layers = {name: m for name, m in model.named_modules() if isinstance(m, ToyLinear)}
    assert len(layers) == 7 * len(text_model(model).layers)
    for name, layer in layers.items():
        assert layer.rows_NK.dtype == torch.int8
        assert torch.equal(layer.restored().weight, meant[f"{name}.weight"]), name


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}, {"enable_lora": True}], ids=str)
def test_answers_are_those_of_the_numbers_that_are_meant(toy: Path, options: dict[str, Any]) -> None:
    assert answers(toy, **options) == answers(toy / "plain")


def test_its_layers_are_joined_by_what_knows_no_method(toy: Path) -> None:
    model = load(toy)
    text = text_model(model)
    attention, x = text.layers[0].self_attn, torch.randn(3, 64)
    want = [getattr(attention, name)(x) for name in ("q_proj", "k_proj", "v_proj")]
    changes = Changes()
    assert fuse_linears(text, changes) == 2 * len(text.layers)
    assert isinstance(attention.q_proj, FirstOfFused)
    assert isinstance(attention.q_proj.product, ToyLinear)
    for name, expected in zip(("q_proj", "k_proj", "v_proj"), want, strict=True):
        torch.testing.assert_close(getattr(attention, name)(x), expected)
    changes.take_back()
    assert isinstance(attention.k_proj, ToyLinear)
    torch.testing.assert_close(attention.k_proj(x), want[1])


def test_refusals_come_from_the_method(toy: Path) -> None:
    config = json.loads((toy / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"]["bits"] = 3
    (toy / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ModelError, match="toy-int8 with 3 bits are not built"):
        load(toy)


def test_others_are_refused_by_name_with_those_that_there_are() -> None:
    with pytest.raises(ModelError, match="quantized by 'aqlm', which is not supported") as caught:
        registry.method_for({"quant_method": "aqlm"}, None, StorageTarget("cpu", torch.float32))
    assert "'compressed-tensors'" in str(caught.value)
    assert registry.method_for(None, None, StorageTarget("cpu", torch.float32)).name == "none"


def test_the_option_may_name_every_method() -> None:
    assert sorted(registry.METHODS) == sorted(QUANTIZED_CHECKPOINTS)


def made(kind: str, outputs: int, inputs: int) -> nn.Module:
    weight, bias = torch.randn(outputs, inputs), torch.randn(outputs)
    if kind == "plain":
        return linear_of(weight, bias)
    if kind == "float8":
        return Float8Linear(*rounded_rows(weight), bias, torch.float32)
    if kind == "int8":
        if not CPU.int8_products:
            pytest.skip("this CPU has no int8 products")
        return Int8Linear.of(linear_of(weight, bias))
    scale = weight.abs().amax(1, keepdim=True) / 127
    return ToyLinear((weight / scale).round().to(torch.int8), scale, bias, torch.float32)


@pytest.mark.parametrize("kind", ["plain", "float8", "toy", "int8"])
@torch.inference_mode()
def test_parts_make_the_whole(kind: str) -> None:
    torch.manual_seed(0)
    layer, x = made(kind, 64, 96), torch.randn(5, 96)
    whole = layer(x)
    halves = [part(layer, slice(0, 32)), part(layer, slice(32, 64))]
    torch.testing.assert_close(torch.cat([half(x) for half in halves], -1), whole)
    torch.testing.assert_close(join(halves)(x), whole)
    assert same_form(halves)
    assert not same_form([layer, nn.Conv2d(1, 1, 1)])
    # Activations are rounded.
    bound = {"float8": 0.05, "int8": 0.01}.get(kind, 1e-5)
    back = layer.restored() if isinstance(layer, StoredLinear) else layer
    assert (back(x) - whole).norm() <= bound * whole.norm()


@torch.inference_mode()
def test_a_part_of_the_experts_is_numbered_from_zero() -> None:
    torch.manual_seed(0)

    def rows(*sizes: int) -> tuple[torch.Tensor, torch.Tensor]:
        found, scale = rounded_rows(torch.randn(sizes).view(-1, sizes[-1]))
        return found.view(torch.uint8).view(sizes).view(FP8), scale.view(sizes[:-1])

    inner = nn.Module()
    inner._apply_gate = lambda x: nn.functional.silu(x[..., :32]) * x[..., 32:]  # type: ignore[assignment]
    experts = Float8Experts(inner, rows(4, 64, 48), rows(4, 48, 32), torch.float32)
    x, choices, weights = torch.randn(6, 48), torch.tensor([[2, 3]] * 6), torch.rand(6, 2)
    own = experts.part(slice(2, 4))
    assert own.num_experts == 2
    torch.testing.assert_close(own(x, choices - 2, weights), experts(x, choices, weights))
    shell: Any = experts.restored()
    assert shell.gate_up_proj.shape == (4, 64, 48)
    assert shell.down_proj.shape == (4, 48, 32)
