"""FP8 weights made at load for a GPU, computed on a CPU in the same numbers: models, sizes, refusals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from beheld.core.config import EngineArgs
from beheld.core.errors import ConfigError, ModelError
from beheld.engine.setup import describe
from beheld.models.surgery.parts import text_model
from beheld.platform.cuda import Cuda
from beheld.platform.registry import platform_of
from beheld.quant import availability, float8_at_load, registry
from beheld.quant.at_load import RoundedAtLoad
from beheld.quant.float8 import Float8Experts, Float8Linear
from beheld.quant.float8_at_load import Float8Rounding
from beheld.quant.linear import linear_of
from beheld.quant.method import StorageTarget
from tests import tiny
from tests.quant.test_int8 import GREEDY, PROMPTS, answers, greedy, load


def make_here(stated: Mapping[str, Any], target: StorageTarget) -> RoundedAtLoad:
    """The method of a GPU, whose products a CPU computes in float32."""
    return RoundedAtLoad(Float8Rounding(), target.dtype)


@pytest.mark.parametrize(("family", "experts"), [("qwen2", 0), ("qwen3_vl_moe", 1), ("gemma2", 0)])
def test_answers_are_those_of_the_rounded_layers(family: str, experts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.AT_LOAD, "fp8", f"{__name__}:make_here")
    surgery = load(family, quantization="fp8")
    model, was = surgery.target.model, dict(load(family).target.model.named_parameters())
    kinds = [type(module) for module in model.modules()]
    layers = len(text_model(model).layers)
    assert kinds.count(Float8Linear) >= 4 * layers
    assert bool(kinds.count(Float8Experts)) == bool(experts)
    args = EngineArgs(model=str(tiny.checkpoint(family)), device="cpu", dtype="float32", quantization="fp8")
    assert describe(args)[2]["weights_bytes"] == pytest.approx(sum(p.nbytes for p in model.parameters()), rel=0.01)
    for ids, (tokens, _) in zip(PROMPTS, answers(family, PROMPTS, quantization="fp8"), strict=True):
        assert list(tokens) == greedy(model.eval(), ids, GREEDY.max_tokens or 0)
    surgery.take_back()
    greatest = 0.0
    for path, value in model.named_parameters():
        far = float((value.data - was[path].data).abs().max() / was[path].data.abs().max())
        # Half a step of three bits of mantissa.
        assert far <= 1 / 16, path
        greatest = max(greatest, far)
    assert greatest > 0.01


def test_transposed_experts_come_back_as_they_were() -> None:
    class Experts(torch.nn.Module):
        is_transposed = True

        def __init__(self) -> None:
            super().__init__()
            self.gate_up_proj = torch.nn.Parameter(torch.randn(3, 32, 64))
            self.down_proj = torch.nn.Parameter(torch.randn(3, 32, 32))

    experts = Experts()
    was = [experts.gate_up_proj.data, experts.down_proj.data]
    made = Float8Rounding().experts(experts)
    assert (made.gate_up_rows.shape, made.down_rows.shape) == ((3, 64, 32), (3, 32, 32))
    back: Any = made.restored()
    for before, after in zip(was, (back.gate_up_proj, back.down_proj), strict=True):
        torch.testing.assert_close(after.data, before, rtol=1 / 15, atol=0.01)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_is_refused(value: float) -> None:
    weight = torch.ones(32, 16)
    weight[3, 5] = value
    with pytest.raises(ModelError, match="NaN or infinity"):
        Float8Rounding().linear(linear_of(weight, None), head=False)


def test_a_gpu_multiplies_and_a_cpu_dequantizes(monkeypatch: pytest.MonkeyPatch) -> None:
    for device, words in (("cpu", "dequantized in each product"), ("cuda", "activations are rounded to FP8")):
        method: Any = float8_at_load.make({}, StorageTarget(device, torch.bfloat16))
        assert words in method._rounding.words
    platform = platform_of("cuda")
    monkeypatch.setattr(Cuda, "fp8_products", True)
    availability.check_at_load("fp8", "fp8", platform, "bfloat16")
    with pytest.raises(ConfigError, match="dtype is 'float16'"):
        availability.check_at_load("fp8", "fp8", platform, "float16")
    monkeypatch.setenv("BEHELD_FP8", "0")
    with pytest.raises(ConfigError, match="BEHELD_FP8=0"):
        availability.check_at_load("fp8", "fp8", platform, "bfloat16")
    monkeypatch.setattr(Cuda, "fp8_products", False)
    with pytest.raises(ConfigError, match="no products of FP8"):
        availability.check_at_load("fp8", "fp8", platform, "bfloat16")
