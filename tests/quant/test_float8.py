"""Products of FP8 numbers stay within what rounding explains, and FP8 weights pass the loader as they are."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from beheld.core.config import EngineArgs, EngineConfig
from beheld.engine.setup import describe
from beheld.models.surgery.joined import FirstOfFused, fuse_linears
from beheld.models.surgery.operation import Changes
from beheld.platform.cpu import Cpu
from beheld.platform.cuda import Cuda
from beheld.platform.registry import platform_of
from beheld.quant import compressed_tensors, kept_blocks
from beheld.quant.compressed_tensors import CompressedTensors, Dequantized
from beheld.quant.float8 import FP8, Float8Experts, Float8Linear, rounded_rows
from beheld.quant.method import StorageTarget
from tests import interpreted, tiny, tiny_quantized
from tests.quant.test_compressed_tensors import load, rewrite

FAMILY = "glm4v_moe_fp8"


@pytest.fixture
def float8(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were products of FP8 numbers everywhere; on a CPU they are then multiplied in float32."""
    monkeypatch.setattr(Cpu, "fp8_products", True)
    monkeypatch.setattr(Cuda, "fp8_products", True)


def numbers(*sizes: int, seed: int = 0) -> Tensor:
    """Of every magnitude, some of them zero."""
    made = torch.Generator().manual_seed(seed)
    values = torch.randn(sizes, generator=made) * torch.exp(3 * torch.randn(sizes, generator=made))
    return torch.where(torch.rand(sizes, generator=made) < 0.1, torch.zeros(()), values)


def half_steps(rows: Tensor) -> Tensor:
    """By how much a number may be off that was rounded to FP8: three bits of mantissa, from 2^-6 on."""
    return torch.maximum(rows.float().abs() / 16, torch.tensor(2.0**-10))


def layer(outputs: int, inputs: int, *, bias: bool, seed: int = 1, dtype: torch.dtype = torch.float32) -> Float8Linear:
    rows, scale = rounded_rows(numbers(outputs, inputs, seed=seed))
    return Float8Linear(rows, scale, numbers(outputs, seed=seed + 1).to(dtype) if bias else None, dtype)


def weight_of(linear: Float8Linear) -> Tensor:
    return linear.rows_NK.float() * linear.scale_N.unsqueeze(1)


def test_rows_are_rounded_to_their_largest() -> None:
    x = numbers(50, 96)
    x[7] = 0
    rows, scale = rounded_rows(x)
    assert rows.dtype == FP8
    assert ((rows.float() * scale.unsqueeze(1) - x).abs() <= half_steps(rows) * scale.unsqueeze(1) * 1.0001).all()
    largest = rows.float().abs().amax(1)
    assert (largest[torch.arange(50) != 7] == 448).all()
    assert largest[7] == 0
    assert scale.isfinite().all()


def test_what_is_no_number_stays_none() -> None:
    x = numbers(3, 32)
    x[1, 4] = float("nan")
    rows, _ = rounded_rows(x)
    assert rows[1].float().isnan().any()
    assert rows[::2].float().isfinite().all()


@pytest.mark.parametrize("bias", [False, True])
def test_a_product_is_off_by_what_was_rounded(bias: bool) -> None:
    linear = layer(32, 64, bias=bias)
    x = numbers(2, 9, 64, seed=5)
    rows, scale = rounded_rows(x.view(18, 64))
    exact = nn.functional.linear(x, weight_of(linear), linear.bias)
    # |sum of (x_k - q_k s) W_k| is at most the sum of the half steps' share.
    bound = (half_steps(rows) * scale.unsqueeze(1)) @ weight_of(linear).abs().t()
    off = (linear(x) - exact).abs().view(18, 32)
    assert (off <= bound * 1.001 + 1e-5 * exact.abs().amax()).all()
    assert off.max() > 0.02 * bound.max(), "activations are rounded indeed"


def test_joined_layers_are_each_exactly_the_same() -> None:
    layers = [layer(16, 32, bias=False), layer(48, 32, bias=True, seed=3), layer(16, 32, bias=True, seed=4)]
    parent = nn.Module()
    parent.q_proj, parent.k_proj, parent.v_proj = layers
    want = [each(numbers(5, 32)) for each in layers]
    assert fuse_linears(parent, Changes()) == 1
    x = numbers(5, 32)
    assert isinstance(parent.q_proj, FirstOfFused)
    for name, expected in zip(("q_proj", "k_proj", "v_proj"), want, strict=True):
        assert torch.equal(getattr(parent, name)(x), expected), name
    # Of another input than the first's, alone.
    other = numbers(3, 32, seed=9)
    assert torch.equal(parent.k_proj(other), layers[1](other))


def test_unlike_layers_are_not_joined() -> None:
    parent = nn.Module()
    parent.gate_proj, parent.up_proj = layer(16, 32, bias=False), nn.Linear(32, 16)
    assert fuse_linears(parent, Changes()) == 0


@pytest.mark.parametrize("beyond", [False, True])
def test_experts_are_their_layers_one_by_one(beyond: bool) -> None:
    gate_up = [layer(64, 48, bias=False, seed=10 + g) for g in range(5)]
    down = [layer(48, 32, bias=False, seed=20 + g) for g in range(5)]
    inner = nn.Module()
    inner._apply_gate = lambda x: nn.functional.silu(x[..., :32]) * x[..., 32:]  # type: ignore[assignment]
    stacks = [
        (torch.stack([x.rows_NK.view(torch.uint8) for x in each]).view(FP8), torch.stack([x.scale_N for x in each]))
        for each in (gate_up, down)
    ]
    experts = Float8Experts(inner, *stacks)
    x = torch.randn(7, 48, generator=torch.Generator().manual_seed(2))
    # Expert 3 is never chosen.
    choices = torch.tensor([[0, 1], [4, 0], [2, 4], [0, 2], [1, 4], [2, 0], [4, 1]])
    weights = torch.rand(7, 2, generator=torch.Generator().manual_seed(3))
    if beyond:
        experts._is_expert_parallel = True
        choices[2] = 5
        choices[4, 0] = 5
    got = experts(x, choices, weights)
    for token in range(7):
        want = torch.zeros(48)
        for place in range(2):
            expert = int(choices[token, place])
            if expert < 5:
                hidden = inner._apply_gate(gate_up[expert](x[token : token + 1]))  # type: ignore[operator]
                want += weights[token, place] * down[expert](hidden)[0]
        torch.testing.assert_close(got[token], want, rtol=1e-4, atol=1e-4 * float(want.abs().max()) + 1e-6)


def plain(name: str) -> dict[str, Tensor]:
    """What the checkpoint's weights mean, in float32."""
    return dict(load(tiny.checkpoint(FAMILY) / tiny_quantized.PLAIN, "float32").named_parameters())


@pytest.fixture
def kept(float8: None) -> Any:
    return load(tiny.checkpoint(FAMILY), "bfloat16")


def test_weights_pass_the_loader_as_they_are(kept: Any) -> None:
    meant = plain(FAMILY)
    linears = {name: m for name, m in kept.named_modules() if isinstance(m, Float8Linear)}
    experts = {name: m for name, m in kept.named_modules() if isinstance(m, Float8Experts)}
    assert (len(linears), len(experts)) == (21, 2)
    for name, module in linears.items():
        assert torch.equal(weight_of(module), meant.pop(f"{name}.weight")), name
    for name, module in experts.items():
        for each in ("gate_up", "down"):
            rows, scale = (getattr(module, f"{each}_{part}") for part in ("rows", "scale"))
            assert torch.equal(rows.float() * scale.unsqueeze(-1), meant.pop(f"{name}.{each}_proj")), name
    # All others are there under their own names, in the model's type.
    others = dict(kept.named_parameters())
    for name, value in meant.items():
        assert torch.equal(others[name], value.bfloat16()), name
    assert type(kept).__name__ == "Glm4vMoeForConditionalGeneration"
    assert type(kept) is type(load(tiny.checkpoint("glm4v_moe"), "bfloat16"))


def test_half_the_memory(kept: Any) -> None:
    def size(model: Any) -> int:
        part = model.model.language_model.layers
        return sum(p.numel() * p.element_size() for p in part.parameters())

    # Sizes are tiny, scales are not.
    assert size(kept) < 0.65 * size(load(tiny.checkpoint("glm4v_moe"), "bfloat16"))


def test_a_plan_counts_the_bytes_that_are_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    def planned(family: str, **options: Any) -> int:
        args = EngineArgs(model=str(tiny.checkpoint(family)), dtype="bfloat16", **options)
        size: int = describe(args)[2]["weights_bytes"]
        return size

    plain = planned("glm4v_moe")
    assert planned(FAMILY) == plain
    monkeypatch.setattr(Cpu, "fp8_products", True)
    size = (tiny.checkpoint(FAMILY) / "model.safetensors").stat().st_size
    assert planned(FAMILY) == size
    assert planned(FAMILY, load_format="dummy") == planned("glm4v_moe") == plain


def test_random_weights_are_said_not_to_be_quantized(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("beheld.models.load.logger.warning", said.append)
    load(tiny.checkpoint("glm4v_moe"), load_format="dummy")
    assert not said
    load(tiny.checkpoint(FAMILY), load_format="dummy")
    assert [line[:33] for line in said] == ["Random weights are not quantized:"]


def test_sizes_that_no_product_takes_are_dequantized(
    float8: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_quantized.quantize(tiny.checkpoint("qwen2_5_vl"), tmp_path, "float32")
    monkeypatch.setattr(compressed_tensors, "ALIGNED", 24)
    said: list[str] = []
    monkeypatch.setattr(kept_blocks.logger, "warning", lambda form, *given: said.append(form % given))
    model = load(tmp_path, "bfloat16")
    found = dict(model.named_parameters())
    assert len(said) == 1
    assert "21 FP8 weights are dequantized because of their layout or size" in said[0]
    assert not [name for name, value in found.items() if value.dtype != torch.bfloat16]
    for name, value in load(tmp_path / tiny_quantized.PLAIN, "bfloat16").named_parameters():
        assert torch.equal(found[name], value), name


def test_one_scale_for_a_whole_weight_is_each_rows(float8: None, tmp_path: Path) -> None:
    tiny_quantized.quantize(tiny.checkpoint("qwen2_5_vl"), tmp_path, "bfloat16")
    name = "model.layers.0.self_attn.q_proj.weight_scale"
    rewrite(tmp_path, lambda weights: weights.update({name: torch.tensor(0.25)}))
    model = load(tmp_path, "bfloat16")
    assert (model.model.language_model.layers[0].self_attn.q_proj.scale_N == 0.25).all()


def test_few_weights_are_read_at_a_time(float8: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Dequantized, "__getitem__", lambda weight, index: pytest.fail("none is dequantized"))
    load(tiny.checkpoint(FAMILY), "bfloat16")


STATED = tiny_quantized.scheme()
WEIGHTS_ONLY = {**STATED, "config_groups": {"g": {**STATED["config_groups"]["group_0"], "input_activations": None}}}


@pytest.mark.parametrize(
    ("stated", "device", "dtype", "reason"),
    [
        (STATED, "cpu", "bfloat16", "this device has no products"),
        (STATED, "cuda", "float32", "float32 was asked for"),
        (STATED, "cuda", "float16", "float16 was asked for"),
        (WEIGHTS_ONLY, "cuda", "bfloat16", "the checkpoint's activations are not FP8"),
        (STATED, "cuda", "bfloat16", None),
    ],
)
def test_one_place_decides_and_says_why(
    stated: Any, device: str, dtype: str, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Cuda, "fp8_products", True)
    said: list[str] = []
    for level in ("info", "warning"):
        monkeypatch.setattr(compressed_tensors.logger, level, lambda form, *given: said.append(form % given))
    method = CompressedTensors(stated, StorageTarget(device, getattr(torch, dtype)))
    assert (method.loading(nn.Module, {}) is nn.Module) == (reason is not None)
    assert len(said) == 1
    assert (reason or "stay as they are") in said[0]


def test_the_variable_dequantizes(float8: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEHELD_FP8", "0")
    assert CompressedTensors(STATED, StorageTarget("cuda", torch.bfloat16)).objection == "BEHELD_FP8=0"


def test_older_devices_dequantize(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, able in (((8, 0), False), ((8, 9), True), ((9, 0), True)):
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda capability=capability: capability)
        assert platform_of("cuda").fp8_products is able
        assert not platform_of("cpu").fp8_products


@pytest.fixture
def compiled() -> Iterator[Callable[[Any], Any]]:
    """One graph or an error, without generating code."""
    torch._dynamo.reset()
    yield lambda function: torch.compile(function, backend="eager", fullgraph=True, dynamic=True)
    torch._dynamo.reset()


def test_a_compiler_sees_one_graph(kept: Any, compiled: Callable[[Any], Any]) -> None:
    block = kept.model.language_model.layers[1].mlp
    x = torch.randn(1, 6, 64, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        for tokens in (6, 3):
            torch.testing.assert_close(compiled(block)(x[:, :tokens]), block(x[:, :tokens]))


def test_layers_can_carry_adapters(kept: Any) -> None:
    from beheld.models.surgery.lora_attach import attach
    from beheld.models.surgery.parts import text_model

    fuse_linears(kept, Changes())
    text = text_model(kept)
    x = torch.randn(1, 4, 64, dtype=torch.bfloat16)
    attention = text.layers[0].self_attn
    want = attention.q_proj(x), attention.k_proj(x), attention.v_proj(x)
    config: Any = type("Options", (EngineConfig,), {"__init__": lambda self: None})()
    for name, value in {"dtype": "bfloat16", "max_loras": 1, "max_lora_rank": 8, "max_cpu_loras": 1}.items():
        object.__setattr__(config, name, value)
    attach(kept, text, config, Changes())
    assert all(map(torch.equal, want, (attention.q_proj(x), attention.k_proj(x), attention.v_proj(x))))
    other = torch.randn(1, 2, 64, dtype=torch.bfloat16)
    assert attention.k_proj(other).shape == (1, 2, 32)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_kernels_in_the_interpreter() -> None:
    interpreted.run(Path(__file__).with_name("triton_interpreted.py"))
