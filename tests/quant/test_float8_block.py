"""FP8 weights by blocks stay as they are where FP8 is multiplied; products stay within what rounding explains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from beheld.core.config import EngineArgs
from beheld.engine.setup import describe
from beheld.models.surgery.latent import pass_latents_on
from beheld.models.surgery.operation import Changes
from beheld.models.surgery.parts import text_model
from beheld.platform.cpu import Cpu
from beheld.platform.cuda import Cuda
from beheld.platform.triton import HAS_TRITON
from beheld.quant import compressed_tensors, kept_blocks
from beheld.quant.compressed_tensors import CompressedTensors
from beheld.quant.float8 import FP8
from beheld.quant.float8_block import BlockFloat8Experts, BlockFloat8Linear, BlockNumbers, rounded_groups
from beheld.quant.fp8 import make
from beheld.quant.linear import join, part, same_form
from beheld.quant.method import StorageTarget
from tests import interpreted, tiny, tiny_quantized
from tests.quant import stored_forms
from tests.quant.test_compressed_tensors import load

CASES = Path(__file__).with_name("float8_block_interpreted.py")
# The tiny models' sizes are multiples of 32, of which 24 divides few.
BLOCKS = (24, 32)
ENTRY = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": list(BLOCKS)}


@pytest.fixture
def float8(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were products of FP8 numbers everywhere; on a CPU they are then multiplied in float32."""
    monkeypatch.setattr(Cpu, "fp8_products", True)


def numbers(outputs: int, inputs: int, height: int, group: int, seed: int = 0) -> BlockNumbers:
    made = torch.Generator().manual_seed(seed)
    rows = torch.randn(outputs, inputs, generator=made).to(FP8)
    return BlockNumbers(rows, torch.rand(outputs // height, inputs // group, generator=made) + 0.1)


def layer(outputs: int, inputs: int, height: int, group: int, *, bias: bool = False) -> BlockFloat8Linear:
    bias_N = torch.randn(outputs, generator=torch.Generator().manual_seed(1)) if bias else None
    return BlockFloat8Linear(numbers(outputs, inputs, height, group, seed=outputs), bias_N, torch.float32)


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_kernels() -> None:
    interpreted.run(CASES)


def test_groups_are_rounded_to_their_largest() -> None:
    x = torch.randn(20, 96, generator=torch.Generator().manual_seed(0)) * torch.arange(1, 97)
    x[7, :32] = 0
    rows, scale = rounded_groups(x, 3)
    assert scale.shape == (3, 20)
    largest = rows.float().unflatten(1, (3, 32)).abs().amax(-1)
    assert largest[7, 0] == 0
    assert (largest.flatten()[torch.arange(60) != 21] == 448).all()
    back = rows.float().unflatten(1, (3, 32)) * scale.t().unsqueeze(-1)
    assert ((back.flatten(1) - x).abs() <= x.abs() / 16 + 2.0**-10 * scale.t().repeat_interleave(32, 1)).all()


@pytest.mark.parametrize("bias", [False, True])
def test_a_product_is_off_by_what_was_rounded(bias: bool) -> None:
    linear = layer(48, 128, 24, 32, bias=bias)
    x = torch.randn(2, 9, 128, generator=torch.Generator().manual_seed(5))
    exact = nn.functional.linear(x, linear.numbers.dequantized(), linear.bias)
    error = (linear(x) - exact).norm() / exact.norm()
    assert 0.005 < error < 0.04
    back = linear.restored()
    torch.testing.assert_close(back(x), exact)


def test_joined_and_cut_layers_are_exactly_the_same() -> None:
    # The second has a scale for each output, because its blocks do not end with it.
    layers = [layer(48, 96, 24, 32), layer(32, 96, 1, 32, bias=True), layer(24, 96, 24, 32)]
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(2))
    assert same_form(layers)
    assert not same_form([layers[0], layer(48, 96, 24, 96)])
    both = join(layers)
    assert isinstance(both, BlockFloat8Linear)
    torch.testing.assert_close(both(x), torch.cat([each(x) for each in layers], -1))
    assert join([layers[0], layers[2]]).numbers.outputs_per_scale == 24  # type: ignore[operator, union-attr]
    for outputs in (slice(0, 48), slice(48, 80), slice(16, 64)):
        torch.testing.assert_close(part(both, outputs)(x), both(x)[:, outputs])


def test_scales_are_held_once_for_a_block_where_they_are_alike() -> None:
    scale = torch.arange(1.0, 13.0).view(4, 3).repeat_interleave(8, 0)
    rows = torch.zeros(32, 96).to(FP8)
    assert BlockNumbers.of_rows(rows, scale, 8).scale.shape == (4, 3)
    assert BlockNumbers.of_rows(rows, scale, 16).scale.shape == (32, 3)
    assert BlockNumbers.of_rows(rows, scale, 20).scale.shape == (32, 3)
    assert BlockNumbers.of_rows(rows.view(2, 16, 96), scale.view(2, 16, 3), 8).scale.shape == (2, 2, 3)


@pytest.mark.parametrize("beyond", [False, True])
def test_experts_are_their_layers_one_by_one(beyond: bool) -> None:
    gate_up, down = ([layer(*sizes) for _ in range(5)] for sizes in ((64, 96, 32, 32), (96, 32, 24, 32)))
    for index, each in enumerate((*gate_up, *down)):
        each.scale_BG.data.mul_(1 + index)
    inner = nn.Module()
    inner._apply_gate = lambda x: nn.functional.silu(x[..., :32]) * x[..., 32:]  # type: ignore[assignment]
    stacks = [
        BlockNumbers(
            torch.stack([x.rows_NK.view(torch.uint8) for x in each]).view(FP8), torch.stack([x.scale_BG for x in each])
        )
        for each in (gate_up, down)
    ]
    experts = BlockFloat8Experts(inner, stacks[0], stacks[1], torch.float32)
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(2))
    choices, weights = torch.tensor([[0, 1], [4, 0], [2, 4]]), torch.rand(3, 2)
    if beyond:
        experts._is_expert_parallel = True
        choices[2, 0] = 5
    got = experts(x, choices, weights)
    for token in range(3):
        want = torch.zeros(96)
        for place in range(2):
            expert = int(choices[token, place])
            if expert < 5:
                hidden = inner._apply_gate(gate_up[expert](x[token : token + 1]))  # type: ignore[operator]
                want += weights[token, place] * down[expert](hidden)[0]
        torch.testing.assert_close(got[token], want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))
    own = experts.part(slice(3, 5))
    torch.testing.assert_close(
        own(x, torch.tensor([[1, 0]] * 3), weights), experts(x, torch.tensor([[4, 3]] * 3), weights)
    )
    shell: Any = experts.restored()
    assert torch.equal(shell.gate_up_proj[3], gate_up[3].numbers.dequantized())


def block_scheme() -> dict[str, Any]:
    """As compressed-tensors states blocks."""
    stated = tiny_quantized.scheme()
    group = stated["config_groups"]["group_0"]
    group["weights"] |= {"strategy": "block", "block_structure": list(BLOCKS)}
    group["input_activations"] |= {"strategy": "group", "group_size": BLOCKS[1]}
    return stated


@pytest.mark.parametrize(("entry", "suffix"), [(ENTRY, "weight_scale_inv"), (block_scheme(), "weight_scale")])
def test_weights_pass_the_loader_as_they_are(float8: None, tmp_path: Path, entry: Any, suffix: str) -> None:
    stored_forms.write(tiny.checkpoint("deepseek_v3"), tmp_path, entry, stored_forms.block_fp8(BLOCKS, suffix))
    kept = load(tmp_path, "bfloat16")
    meant = dict(load(tmp_path / "plain", "float32").named_parameters())
    linears = {name: m for name, m in kept.named_modules() if isinstance(m, BlockFloat8Linear)}
    experts = {name: m for name, m in kept.named_modules() if isinstance(m, BlockFloat8Experts)}
    assert len(linears) > 10
    assert len(experts) == len(kept.model.layers) - 1
    for name, module in linears.items():
        assert torch.equal(module.numbers.dequantized(), meant.pop(f"{name}.weight")), name
    for name, module in experts.items():
        for each in ("gate_up", "down"):
            assert torch.equal(module._numbers(each).dequantized(), meant.pop(f"{name}.{each}_proj")), name
    others = dict(kept.named_parameters())
    for name, value in meant.items():
        assert torch.equal(others[name], value.bfloat16()), name


def test_latents_are_expanded_by_the_dequantized_weights(float8: None, tmp_path: Path) -> None:
    """Products of FP8 round latents, which is no sign of a layer of another kind."""
    stored_forms.write(tiny.checkpoint("deepseek_v3"), tmp_path, ENTRY, stored_forms.block_fp8(BLOCKS))
    model, changes = load(tmp_path, "bfloat16"), Changes()
    attention = model.model.layers[0].self_attn
    stored = attention.kv_b_proj
    assert isinstance(stored, BlockFloat8Linear)
    assert pass_latents_on(text_model(model), changes) == len(model.model.layers)
    assert torch.equal(attention.kv_b_proj.weight, stored.numbers.dequantized().bfloat16())
    changes.take_back()


def test_a_plan_counts_the_bytes_that_are_kept(float8: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored_forms.write(tiny.checkpoint("qwen2"), tmp_path, ENTRY, stored_forms.block_fp8(BLOCKS))

    def planned() -> int:
        size: int = describe(EngineArgs(model=str(tmp_path), dtype="bfloat16"))[2]["weights_bytes"]
        return size

    kept = load(tmp_path, "bfloat16")
    assert planned() == sum(p.numel() * p.element_size() for p in kept.parameters())
    monkeypatch.setenv("BEHELD_FP8", "0")
    assert planned() > 1.2 * sum(p.numel() * p.element_size() for p in kept.parameters())


def test_blocks_that_no_product_takes_are_dequantized(
    float8: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(kept_blocks.logger, "warning", lambda form, *given: said.append(form % given))
    entry = ENTRY | {"weight_block_size": [24, 40]}
    stored_forms.write(tiny.checkpoint("qwen2"), tmp_path, entry, stored_forms.block_fp8((24, 40)))
    found = dict(load(tmp_path, "bfloat16").named_parameters())
    assert "FP8 weights are dequantized because of their layout or size" in said[0]
    for name, value in load(tmp_path / "plain", "bfloat16").named_parameters():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize(
    ("device", "dtype", "exact", "reason"),
    [
        ("cpu", "bfloat16", False, "this device has no products of FP8 numbers"),
        ("cuda", "float32", False, "not float32"),
        ("cuda", "bfloat16", True, "given in bfloat16"),
        ("cuda", "bfloat16", False, None),
    ],
)
def test_one_place_decides_and_says_why(
    device: str, dtype: str, exact: bool, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Cuda, "fp8_products", True)
    target = StorageTarget(device, getattr(torch, dtype), exact)
    said: list[str] = []
    for module in (kept_blocks, compressed_tensors, __import__("beheld.quant.dequantize", fromlist=["logger"])):
        for level in ("info", "warning"):
            monkeypatch.setattr(module.logger, level, lambda form, *given: said.append(form % given))
    for method in (make(ENTRY, target), CompressedTensors(block_scheme(), target)):
        said.clear()
        assert (method.loading(nn.Module, {}) is nn.Module) == (reason is not None)
        assert len(said) == 1
        assert (reason or "stay as they are") in said[0]
    monkeypatch.setenv("BEHELD_FP8", "0")
    assert make(ENTRY, target).loading(nn.Module, {}) is nn.Module


def test_a_compiler_sees_one_graph(float8: None) -> None:
    linear = layer(48, 96, 24, 32, bias=True)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: linear(x * 2.0), backend="eager", fullgraph=True, dynamic=True)
    with torch.inference_mode():
        for rows in (6, 3):
            x: Tensor = torch.randn(1, rows, 96)
            torch.testing.assert_close(compiled(x), linear(x * 2.0))
    torch._dynamo.reset()
