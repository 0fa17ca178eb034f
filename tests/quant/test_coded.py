"""NF4 and FP8 weights made at load on a CPU: models against dequantized weights, sizes, joined layers, refusals."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn

from beheld import LLM
from beheld.checkpoint.info import read_info
from beheld.checkpoint.resolve import resolve
from beheld.core.config import EngineArgs
from beheld.core.errors import ConfigError, ModelError
from beheld.engine.setup import decide, describe
from beheld.models.surgery.parts import text_model
from beheld.platform.registry import CPU
from beheld.quant import coded, registry
from beheld.quant.coded import NF4_VALUES, CodedLinear, FP8Linear, NF4Linear
from beheld.quant.linear import StoredLinear, join, linear_of, part, same_form
from beheld.quant.method import StorageTarget
from tests import tiny
from tests.quant.test_int8 import GREEDY, PROMPTS, answers, greedy, load

# A weight's greatest error as a share of the largest weight of its group, and the least at which rounding is seen.
ERRORS = {"nf4": (0.16, 0.05), "fp8": (0.04, 0.01)}
KINDS: dict[str, type[CodedLinear]] = {"nf4": NF4Linear, "fp8": FP8Linear}


@pytest.mark.parametrize("family", ["qwen2", "qwen3_vl_moe"])
@pytest.mark.parametrize("name", KINDS)
def test_answers_are_those_of_the_dequantized_weights(name: str, family: str) -> None:
    surgery = load(family, quantization=name)
    model, was = surgery.target.model, dict(load(family).target.model.named_parameters())
    rounded = [path for path, module in model.named_modules() if isinstance(module, KINDS[name])]
    assert len(rounded) >= 4 * len(text_model(model).layers)
    assert type(model.get_output_embeddings()) is nn.Linear
    args = EngineArgs(model=str(tiny.checkpoint(family)), device="cpu", dtype="float32", quantization=name)
    assert describe(args)[2]["weights_bytes"] == pytest.approx(sum(p.nbytes for p in model.parameters()), rel=0.01)
    surgery.take_back()
    greatest = 0.0
    for path, value in model.named_parameters():
        far = float((value.data - was[path].data).abs().max() / was[path].data.abs().max())
        assert far <= ERRORS[name][0], path
        greatest = max(greatest, far)
    assert greatest > ERRORS[name][1]
    for ids, (tokens, _) in zip(PROMPTS, answers(family, PROMPTS, quantization=name), strict=True):
        assert list(tokens) == greedy(model.eval(), ids, GREEDY.max_tokens or 0)


@pytest.mark.parametrize("name", KINDS)
def test_weights_that_are_no_numbers_are_refused(name: str) -> None:
    layer = nn.Linear(64, 16)
    layer.weight.data[3, 4] = float("nan")
    with pytest.raises(ModelError, match="NaN or infinity"):
        KINDS[name].of(layer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", KINDS)
@torch.inference_mode()
def test_layers_are_joined_and_cut(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    kind, x = KINDS[name], torch.randn(5, 128, dtype=dtype)
    # Some outputs at a time.
    monkeypatch.setattr(coded, "_CHUNK", 1 << 11)
    layers = [kind.of(linear_of(torch.randn(n, 128, dtype=dtype), torch.randn(n, dtype=dtype))) for n in (24, 40)]
    apart = torch.cat([layer(x) for layer in layers], -1)
    exact = torch.cat([layer.restored()(x) for layer in layers], -1)  # type: ignore[operator]
    bound: Any = {"rtol": 2e-2, "atol": 0.2} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(apart, exact, **bound)
    whole = join(layers)
    assert same_form(layers)
    torch.testing.assert_close(whole(x), apart, **bound)
    torch.testing.assert_close(part(whole, slice(10, 50))(x), apart[:, 10:50], **bound)
    assert isinstance(whole, StoredLinear)


def test_values_are_the_nearest() -> None:
    weight = torch.tensor([NF4_VALUES]).repeat(1, 2) * 3
    codes, scale = NF4Linear.rounded(weight)
    assert scale.unique().tolist() == [3.0]
    assert torch.equal(NF4Linear.decoded(codes, scale), weight)
    near = torch.rand(64, 64) * 2 - 1
    near[:, 0] = 1
    found = NF4Linear.decoded(*NF4Linear.rounded(near))
    nearest = torch.tensor(NF4_VALUES)[(near.unsqueeze(-1) - torch.tensor(NF4_VALUES)).abs().argmin(-1)]
    assert torch.equal(found, nearest)


@pytest.mark.parametrize("name", [*KINDS, "int4", "int8"])
def test_one_layer_is_held_twice(name: str) -> None:
    if name.startswith("int") and CPU.no_grouped_products is not None:
        pytest.skip(CPU.no_grouped_products)
    model = load("qwen2").target.model
    weights = [weakref.ref(p) for p in text_model(model).layers.parameters() if p.dim() > 1]
    alive: list[int] = []

    def replace(parent: nn.Module, name: str, new: nn.Module, restore: Any) -> None:
        alive.append(sum(ref() is not None for ref in weights))
        setattr(parent, name, new)

    method = registry.method_for(None, name, StorageTarget("cpu", torch.float32))
    method.settle(model, type(model), text_model, replace)
    assert alive[: len(weights)] == list(range(len(weights), 0, -1))
    assert not any(ref() is not None for ref in weights)


def test_bitsandbytes_of_plain_weights_is_nf4(caplog: pytest.LogCaptureFixture) -> None:
    """vLLM's scripts name it for checkpoints that are not quantized."""
    args = EngineArgs(str(tiny.checkpoint("qwen2")), device="cpu", quantization="bitsandbytes")
    assert decide(args, read_info(resolve(args), args)).quantization == "nf4"
    args = EngineArgs(str(tiny.checkpoint("glm4v_moe_fp8")), quantization="bitsandbytes")
    with pytest.raises(ConfigError, match="is quantized by 'compressed-tensors'"):
        read_info(resolve(args), args)


def test_what_cannot_be_is_refused() -> None:
    for kind in KINDS.values():
        with pytest.raises(ModelError, match="NaN"):
            kind.of(linear_of(torch.full((4, 32), float("inf")), None))
    with pytest.raises(ConfigError, match="is quantized by 'compressed-tensors'"):
        LLM(str(tiny.checkpoint("glm4v_moe_fp8")), quantization="nf4")
