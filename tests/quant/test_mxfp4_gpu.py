"""MXFP4 experts on a GPU: the kernels in Triton's interpreter, what is kept, and the same numbers on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from beheld.core.config import EngineArgs
from beheld.core.errors import ModelError
from beheld.engine.setup import describe
from beheld.platform.cuda import Cuda
from beheld.platform.triton import HAS_TRITON
from beheld.quant import mxfp4
from beheld.quant.method import StorageTarget
from beheld.quant.mxfp4_experts import MXFP4Experts, dequantized, parted, repacked, unpacked
from tests import interpreted, tiny, tiny_quantized
from tests.quant.test_mxfp4 import UP, load

CASES = Path(__file__).with_name("mxfp4_interpreted.py")


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a CPU multiplied them; it does so in float32."""
    monkeypatch.setattr(mxfp4, "objection", lambda target: None)


def entries(experts: int, outputs: int, inputs: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8, generator=made)
    return blocks, torch.randint(118, 128, (experts, outputs, inputs // 32), dtype=torch.uint8, generator=made)


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_kernels() -> None:
    interpreted.run(CASES)


@pytest.mark.parametrize("inputs", [32, 160, 256])
def test_nothing_is_lost_by_repacking(inputs: int) -> None:
    given = entries(3, 16, inputs)
    found = unpacked(*repacked(*given), inputs // 32)
    assert all(torch.equal(mine, its) for mine, its in zip(found, given, strict=True))


def test_activations_are_sums_of_two_terms() -> None:
    x = torch.randn(50, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[3] *= 1e30
    x[4] *= 1e-30
    x[5] = 0
    terms, scale = parted(x)
    back = terms.float().sum(1)[:, :96] * scale[:, None]
    largest = x.float().abs().amax(1, keepdim=True)
    near = x.float().abs() >= largest / 2**9
    assert torch.equal(back[near], x.float()[near])
    assert ((back - x.float()).abs() <= largest * 2.0**-17).all()
    assert not terms[:, :, 96:].float().any()


class Gate(nn.Module):
    """What gpt-oss's experts do between the two products, without its limits."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj_bias = nn.Parameter(torch.randn(4, 64, generator=torch.Generator().manual_seed(1)))
        self.down_proj_bias = nn.Parameter(torch.randn(4, 96, generator=torch.Generator().manual_seed(2)))

    def _apply_gate(self, x: Tensor) -> Tensor:
        return (x[..., 1::2] + 1) * nn.functional.silu(x[..., ::2])


@pytest.mark.parametrize("beyond", [False, True])
@torch.inference_mode()
def test_experts_are_their_products_one_by_one(beyond: bool) -> None:
    gate_up, down = entries(4, 64, 96), entries(4, 96, 32, seed=5)
    shell = Gate()
    biases = shell.gate_up_proj_bias, shell.down_proj_bias
    experts = MXFP4Experts(shell, repacked(*gate_up), repacked(*down), (3, 1))
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(2))
    choices, weights = torch.tensor([[0, 1], [3, 0], [2, 3], [0, 2], [1, 3]]), torch.rand(5, 2)
    if beyond:
        experts._is_expert_parallel = True
        choices[2, 0] = 4
    got = experts(x, choices, weights)
    up, back = dequantized(*gate_up).float(), dequantized(*down).float()
    for token in range(5):
        want = torch.zeros(96)
        for place, expert in enumerate(choices[token].tolist()):
            if expert < 4:
                hidden = shell._apply_gate(x[token] @ up[expert] + biases[0][expert])
                want += weights[token, place] * (hidden @ back[expert] + biases[1][expert])
        torch.testing.assert_close(got[token], want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))
    last = torch.tensor([[3, 2]] * 5)
    whole = experts(x, last, weights)
    torch.testing.assert_close(experts.part(slice(2, 4))(x, last - 2, weights), whole)


@torch.inference_mode()
def test_restored_experts_have_the_dequantized_weights() -> None:
    gate_up, down = entries(4, 64, 96), entries(4, 96, 32, seed=5)
    shell = Gate()
    bias = shell.down_proj_bias
    back: Any = MXFP4Experts(shell, repacked(*gate_up), repacked(*down), (3, 1)).restored()
    assert torch.equal(back.gate_up_proj, dequantized(*gate_up))
    assert torch.equal(back.down_proj, dequantized(*down))
    assert back.down_proj_bias is bias


def test_a_model_keeps_them_and_answers_alike(kept: None) -> None:
    path = tiny.checkpoint("gpt_oss")
    # In float32 they are multiplied as they are.
    model, meant = load(path, "float32"), load(path / tiny_quantized.PLAIN, "float32")
    experts = {name: m for name, m in model.named_modules() if isinstance(m, MXFP4Experts)}
    assert len(experts) == 4
    assert type(model) is type(meant)
    ids = torch.arange(5, 45)[None]
    with torch.inference_mode():
        got, want = (each(input_ids=ids).logits for each in (model, meant))
    torch.testing.assert_close(got, want)
    found = dict(meant.named_parameters())
    for name, module in experts.items():
        back: Any = module.restored()
        for each in ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"):
            assert torch.equal(getattr(back, each).float(), found[f"{name}.{each}"]), (name, each)


def test_a_factor_that_the_kernel_of_one_row_cannot_hold_is_refused() -> None:
    blocks, scales = entries(2, 16, 32)
    scales[1, 3, 0] = 192
    shell = nn.Module()
    shell.gate_up_proj = nn.Parameter(torch.cat([blocks.flatten(2), scales], -1), requires_grad=False)
    with pytest.raises(ModelError, match=r"gate_up_proj_scales' holds 192, a factor of 2\^65.*at most 2\^64"):
        mxfp4._parted(shell, "gate_up_proj")


def test_a_plan_counts_the_bytes_that_are_kept(kept: None) -> None:
    path = tiny.checkpoint("gpt_oss")
    model = load(path, "bfloat16")
    size: int = describe(EngineArgs(model=str(path), dtype="bfloat16"))[2]["weights_bytes"]
    assert size == sum(p.numel() * p.element_size() for p in model.parameters())
    assert UP.replace("gate_up_proj", "gate_up_bytes") in dict(model.named_parameters())


@pytest.mark.parametrize(
    ("device", "dtype", "exact", "reason"),
    [
        ("cpu", "bfloat16", False, "only a GPU"),
        ("cuda", "float32", False, "not float32"),
        ("cuda", "bfloat16", True, "products are of bfloat16"),
        ("cuda", "bfloat16", False, None),
    ],
)
def test_one_place_decides_and_says_why(
    device: str, dtype: str, exact: bool, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Cuda, "fp8_products", True)
    target = StorageTarget(device, getattr(torch, dtype), exact)
    found = mxfp4.make({}, target).objection
    assert (found is None) if reason is None else (found is not None and reason in found)
    if device == "cuda":
        monkeypatch.setenv("BEHELD_KEEP_BITS", "0")
        assert mxfp4.make({}, target).objection == "BEHELD_KEEP_BITS=0"
        monkeypatch.setattr(Cuda, "fp8_products", False)
        assert "no products of FP8" in str(mxfp4.make({}, target).objection)
