"""int8 weights on a GPU, computed on a CPU in the same numbers: kernels, layers, models, checkpoints, refusals."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from beheld.core.config import EngineArgs
from beheld.core.errors import ConfigError, ModelError
from beheld.engine.setup import describe
from beheld.models.surgery.joined import fuse_linears
from beheld.models.surgery.operation import Changes
from beheld.models.surgery.parts import text_model
from beheld.platform.cpu import Cpu
from beheld.platform.cuda import Cuda
from beheld.platform.registry import platform_of
from beheld.platform.triton import HAS_TRITON
from beheld.quant import availability, bitsandbytes, int8, registry
from beheld.quant.at_load import RoundedAtLoad
from beheld.quant.int8 import Int8GPURounding, rounded_weight
from beheld.quant.int8_gpu import MOST_INPUTS, Int8GPULinear, fits, rounded_rows
from beheld.quant.kept_groups import KeptGroups
from beheld.quant.linear import linear_of
from beheld.quant.method import StorageTarget
from tests import interpreted, tiny
from tests.quant import stored_forms
from tests.quant.stored_forms import Form
from tests.quant.test_compressed_integers import FORMS, group, stated
from tests.quant.test_compressed_tensors import load as loaded
from tests.quant.test_int8 import GREEDY, PROMPTS, answers, greedy, load

CASES = Path(__file__).with_name("int8_interpreted.py")
ACTIVATIONS = {"type": "int", "num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True}


@pytest.fixture(autouse=True)
def asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Off by default: no GPU has run the kernels yet."""
    monkeypatch.setenv("BEHELD_INT8_ON_GPU", "1")


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_kernels() -> None:
    interpreted.run(CASES)


def numbers(*sizes: int, seed: int = 0) -> Tensor:
    """Of every magnitude, some of them zero."""
    made = torch.Generator().manual_seed(seed)
    values = torch.randn(sizes, generator=made) * torch.exp(torch.randn(sizes, generator=made))
    return torch.where(torch.rand(sizes, generator=made) < 0.1, torch.zeros(()), values)


def layer(outputs: int, inputs: int, *, bias: bool, seed: int = 1) -> Int8GPULinear:
    rows, scale = rounded_weight(numbers(outputs, inputs, seed=seed))
    return Int8GPULinear(rows, scale, numbers(outputs, seed=seed + 1) if bias else None, torch.float32)


def test_rows_are_rounded_to_their_largest() -> None:
    x = numbers(50, 96)
    x[7] = 0
    rows, step = rounded_rows(x)
    assert rows.dtype == torch.int8
    assert ((rows.float() * step.unsqueeze(1) - x).abs() <= 0.5001 * step.unsqueeze(1)).all()
    largest = rows.int().abs().amax(1)
    assert (largest[torch.arange(50) != 7] == 127).all()
    assert largest[7] == 0
    x[3, 5] = float("nan")
    assert rounded_rows(x)[1].isnan().nonzero().tolist() == [[3]]


@pytest.mark.parametrize("bias", [False, True])
def test_a_product_is_off_by_what_was_rounded(bias: bool) -> None:
    linear = layer(32, 64, bias=bias)
    x = numbers(2, 9, 64, seed=5)
    _, step = rounded_rows(x.view(18, 64))
    exact = nn.functional.linear(x, linear.dequantized(), linear.bias)
    # |sum of (x_k - q_k step) W_k| is at most half a step's share.
    bound = 0.5 * step.unsqueeze(1) * linear.dequantized().abs().sum(1)
    off = (linear(x) - exact).abs().view(18, 32)
    assert (off <= bound * 1.001 + 1e-5 * exact.abs().amax()).all()
    assert off.max() > 0.02 * bound.max(), "activations are rounded indeed"


def test_a_row_has_the_same_bits_in_any_batch_joined_and_cut() -> None:
    layers = [layer(16, 32, bias=False), layer(48, 32, bias=True, seed=3), layer(16, 32, bias=True, seed=4)]
    parent = nn.Module()
    parent.q_proj, parent.k_proj, parent.v_proj = layers
    x = numbers(5, 32)
    want = [each(x) for each in layers]
    for row in range(5):
        assert torch.equal(layers[1](x[row : row + 1]), want[1][row : row + 1])
        assert torch.equal(layers[1](x[row]), want[1][row])
    assert fuse_linears(parent, Changes()) == 1
    for name, expected in zip(("q_proj", "k_proj", "v_proj"), want, strict=True):
        assert torch.equal(getattr(parent, name)(x), expected), name
    assert torch.equal(layers[1].part(slice(16, 32))(x), want[1][:, 16:32])
    restored = layers[1].restored()
    assert isinstance(restored, nn.Linear)
    assert torch.equal(restored.weight, layers[1].dequantized())


def test_what_the_kernels_take() -> None:
    assert fits(16, 48)
    assert fits(16, MOST_INPUTS)
    # The largest sum is the largest that 32 bits hold, but for a few inputs.
    assert 128 * 127 * MOST_INPUTS < 2**31 < 128 * 127 * (MOST_INPUTS + 2048)
    assert not fits(16, MOST_INPUTS + 16)
    assert not fits(24, 48)
    assert not fits(16, 40)


def make_here(stated: Mapping[str, Any], target: StorageTarget) -> RoundedAtLoad:
    """The method of a GPU, whose products a CPU computes in float64."""
    return RoundedAtLoad(Int8GPURounding(), target.dtype)


@pytest.mark.parametrize("family", ["qwen2", "qwen3_vl_moe", "gemma2"])
def test_answers_are_those_of_layers_rounded_at_load(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.AT_LOAD, "int8", f"{__name__}:make_here")
    surgery = load(family, quantization="int8")
    model, was = surgery.target.model, dict(load(family).target.model.named_parameters())
    layers = [module for module in model.modules() if isinstance(module, Int8GPULinear)]
    assert len(layers) >= 4 * len(text_model(model).layers)
    assert not isinstance(model.get_output_embeddings(), Int8GPULinear)
    args = EngineArgs(model=str(tiny.checkpoint(family)), device="cpu", dtype="float32", quantization="int8")
    assert describe(args)[2]["weights_bytes"] == sum(p.nbytes for p in model.parameters())
    for ids, (tokens, _) in zip(PROMPTS, answers(family, PROMPTS), strict=True):
        assert list(tokens) == greedy(model.eval(), ids, GREEDY.max_tokens or 0)
    # However a prompt is cut and whatever it shares a step with.
    options = {"enforce_eager": True, "enable_prefix_caching": False, "max_num_batched_tokens": 16}
    assert [tokens for tokens, _ in answers(family, PROMPTS, **options)] == [
        answers(family, [ids])[0][0] for ids in PROMPTS
    ]
    surgery.take_back()
    rounded = 0
    for path, value in model.named_parameters():
        steps = was[path].data.abs().amax(-1, keepdim=True) / 127 if value.dim() > 1 else torch.zeros(1)
        off = (value.data - was[path].data).abs()
        assert (off <= 0.501 * steps).all(), path
        rounded += bool(off.any())
    assert rounded == len(layers)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_is_refused(value: float) -> None:
    weight = torch.ones(32, 16)
    weight[3, 5] = value
    with pytest.raises(ModelError, match="NaN or infinity"):
        Int8GPURounding().linear(linear_of(weight, None), head=False)


def test_where_weights_are_rounded_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    method: Any = int8.make({}, StorageTarget("cuda", torch.bfloat16))
    assert "rounded to int8 by token" in method._rounding.words
    method = int8.make({}, StorageTarget("cpu", torch.bfloat16))
    assert not isinstance(method._rounding, Int8GPURounding)
    platform = platform_of("cuda")
    monkeypatch.setattr(platform, "has_triton", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    for dtype in ("bfloat16", "float16"):
        availability.check_at_load("int8", "int8", platform, dtype)
    with pytest.raises(ConfigError, match="dtype is 'float32'") as caught:
        availability.check_at_load("int8", "int8", platform, "float32")
    assert "On a GPU of compute capability 8.0 or later" in str(caught.value.remedy)
    monkeypatch.delenv("BEHELD_INT8_ON_GPU")
    with pytest.raises(ConfigError, match="BEHELD_INT8_ON_GPU is not 1") as caught:
        availability.check_at_load("int8", "int8", platform, "bfloat16")
    assert "set BEHELD_INT8_ON_GPU=1" in str(caught.value.remedy)
    monkeypatch.setenv("BEHELD_INT8_ON_GPU", "1")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    with pytest.raises(ConfigError, match=r"below 8\.0"):
        availability.check_at_load("int8", "int8", platform, "bfloat16")
    monkeypatch.setattr(platform, "has_triton", False)
    with pytest.raises(ConfigError, match="Triton is not installed"):
        availability.check_at_load("int8", "int8", platform, "bfloat16")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the CPU were a GPU that keeps int8 weights; on a CPU they are then multiplied in float64."""
    monkeypatch.setattr(Cpu, "shares_host_memory", False)
    monkeypatch.setattr(Cpu, "no_int8_rows", None)
    monkeypatch.setattr(Cpu, "no_grouped_products", "4 bits are another test's")


def with_activations(name: str, activations: Any = ACTIVATIONS) -> tuple[dict[str, Any], Form]:
    entry, form = copy.deepcopy(FORMS[name])
    for each in entry["config_groups"].values():
        each["input_activations"] = activations
    return entry, form


def written(path: Path, entry: dict[str, Any], form: Form, family: str = "qwen2") -> Path:
    stored_forms.write(tiny.checkpoint(family), path, entry, form, "lm_head")
    return path


def eights(model: nn.Module) -> dict[str, Int8GPULinear]:
    return {name: each for name, each in model.named_modules() if isinstance(each, Int8GPULinear)}


STATIC = {**ACTIVATIONS, "strategy": "tensor", "dynamic": False}


@pytest.mark.parametrize(
    ("name", "activations"), [("W8A8", ACTIVATIONS), ("W8A8", STATIC), ("W8A8 by tensor", ACTIVATIONS)]
)
def test_a_checkpoints_numbers_are_kept(tmp_path: Path, gpu: None, name: str, activations: Any) -> None:
    path = written(tmp_path, *with_activations(name, activations))
    model, meant = loaded(path, "bfloat16"), dict(loaded(path / "plain").named_parameters())
    layers = eights(model)
    assert len(layers) == 7 * len(text_model(model).layers)
    for each, linear in layers.items():
        assert torch.equal(linear.dequantized(), meant.pop(f"{each}.weight")), each
        assert linear.rows_NK.is_contiguous()
        assert linear.weight.dtype == torch.bfloat16
    args = EngineArgs(model=str(path), dtype="bfloat16")
    assert describe(args)[2]["weights_bytes"] == sum(p.nbytes for p in model.parameters())
    # Log-probabilities are near those of the numbers that are meant, and not the same: activations are rounded.
    ids = torch.tensor([PROMPTS[0]])
    with torch.inference_mode():
        got = model.eval()(input_ids=ids, use_cache=False).logits.float().log_softmax(-1)
        plain = loaded(path / "plain", "bfloat16").eval()
        want = plain(input_ids=ids, use_cache=False).logits.float().log_softmax(-1)
    assert 0 < float((got - want).abs().mean()) < 0.1


ZEROED = {**ACTIVATIONS, "symmetric": False}


@pytest.mark.parametrize(
    ("name", "activations"),
    [("W8A8", None), ("W8A8", ZEROED), ("W8A8 with zeros", ACTIVATIONS), ("int8 by group", ACTIVATIONS)],
)
def test_other_forms_are_dequantized(tmp_path: Path, gpu: None, name: str, activations: Any) -> None:
    path = written(tmp_path, *with_activations(name, activations))
    model = loaded(path, "bfloat16")
    assert not eights(model)
    found, meant = (dict(each.named_parameters()) for each in (model, loaded(path / "plain", "bfloat16")))
    assert found.keys() == meant.keys()
    assert all(torch.equal(value, meant[each]) for each, value in found.items())


def test_experts_are_dequantized_and_float32_is_exact(tmp_path: Path, gpu: None) -> None:
    entry, form = with_activations("W8A8")
    path = written(tmp_path / "experts", entry, form, "glm4v_moe")
    found = eights(loaded(path, "bfloat16"))
    assert found
    assert not [name for name in found if ".experts." in name]
    assert not eights(loaded(written(tmp_path / "exact", entry, form), "float32"))


def test_each_group_of_modules_decides(gpu: None) -> None:
    """Weights in 4 bits do not keep W8A8 from being kept; 8 bits without activations do."""
    four, eight = group(4, "group", "pack-quantized", group_size=16), group(8, "channel", "int-quantized")
    rounds = eight | {"input_activations": ACTIVATIONS}
    for groups, kept in (((rounds, four), True), ((rounds, eight), False), ((four,), False)):
        method: Any = registry.method_for(
            stated("mixed-precision", *groups), None, StorageTarget("cpu", torch.bfloat16)
        )
        assert (method._groups.objection is None) == kept


def test_bitsandbytes_without_a_threshold(gpu: None) -> None:
    """With one, activations beyond it are not rounded."""
    for threshold, kept in ((0.0, True), (6.0, False), (None, False)):
        entry = {"load_in_8bit": True, "llm_int8_threshold": threshold}
        method: Any = bitsandbytes.make(entry, StorageTarget("cpu", torch.bfloat16))
        assert (method._keeping.objection is None) == kept


def test_the_variable_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform_of("cuda"), "has_triton", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(Cuda, "bfloat16_products", True)
    target = StorageTarget("cuda", torch.bfloat16)
    monkeypatch.setenv("BEHELD_INT4_ON_GPU", "0")
    assert KeptGroups(target, rounds=True).objection is None
    assert KeptGroups(target).objection == "BEHELD_INT4_ON_GPU=0"
    monkeypatch.setenv("BEHELD_INT8_ON_GPU", "0")
    assert KeptGroups(target, rounds=True).objection is not None
