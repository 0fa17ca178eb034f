"""Attention beside the text on a GPU: against float64, and without waiting for the device."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

from tests.attention.cross_reference import LAYERS, decode, expected, metadata, states

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from beheld.attention.cross import CrossMetadata, SDPACross
from beheld.attention.triton_cross import TritonCross

# What rounding of inputs, weights and output to the type costs, relative; float32 is exact but for its own rounding.
ROUNDING = {torch.float32: 3e-6, torch.float16: 6e-4, torch.bfloat16: 5e-3}
SCALE = 0.1

Shape = tuple[int, int, int]
# Heads, key-value heads, size: those of Llama 3.2 Vision with 11 and 90 billion parameters, Florence-2's, and others.
SHAPES: list[Shape] = [(32, 8, 128), (64, 8, 128), (12, 12, 64), (14, 2, 80), (6, 2, 96), (16, 1, 112)]
# Four tiles of a picture are 6404 states of Llama 3.2 Vision.
COUNTS = [1, 63, 64, 65, 577, 1601, 6404]


def queries(num_tokens: int, shape: Shape, dtype: torch.dtype) -> Tensor:
    return torch.randn(num_tokens, shape[0], shape[2], dtype=dtype, device="cuda")


def kept(count: int, shape: Shape, dtype: torch.dtype) -> Tensor:
    return states(count, shape[1], shape[2], dtype, "cuda")


def mixed(shape: Shape, dtype: torch.dtype) -> tuple[Tensor, CrossMetadata]:
    """Prompts of several lengths, some of them seeing several items or beginnings of some, and tokens that decode."""
    a, b, c = (kept(count, shape, dtype) for count in (6404, 100, 577))
    known = metadata(
        400,
        (((0, 1), (2, 3)), (a,)),
        (((1, 2),), (b, c)),
        (((4, 150), (301, 390)), (a, b)),
        (((160, 300),), (c, a[:1601])),
        (((300, 301),), (b[:1],)),
    )
    return queries(400, shape, dtype), known


def check(q_THC: Tensor, known: CrossMetadata) -> None:
    backend = TritonCross()
    for layer in range(LAYERS):
        # Memory that a result is made in holds NaN: what is not written shows.
        torch.full((q_THC.numel(),), float("nan"), dtype=q_THC.dtype, device="cuda")
        out_THC, want_THC = backend.attend(q_THC, layer, known, SCALE), expected(q_THC, layer, known, SCALE)
        assert not out_THC.isnan().any()
        error_TH, bound = (out_THC.double() - want_THC).norm(dim=-1), ROUNDING[q_THC.dtype]
        assert error_TH.norm() < bound * want_THC.norm()
        assert (error_TH <= 4 * bound * want_THC.norm(dim=-1)).all(), "one head of one token is wrong"


@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_float64(shape: Shape, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for counts in (COUNTS, COUNTS[-1:], COUNTS[:1], [6404, 1601] * 20):
        check(queries(len(counts), shape, dtype), decode(*((kept(count, shape, dtype),) for count in counts)))
    check(*mixed(shape, dtype))


def test_agrees_with_pytorch_s_own() -> None:
    torch.manual_seed(1)
    q_THC, known = mixed(SHAPES[0], torch.float32)
    want_THC = SDPACross().attend(q_THC, 1, known, SCALE)
    torch.testing.assert_close(TritonCross().attend(q_THC, 1, known, SCALE), want_THC, atol=1e-5, rtol=1e-4)


def test_every_run_gives_the_same_bits() -> None:
    """Parts join in one order, whichever finishes last; a race would show here."""
    q_THC, known = mixed(SHAPES[0], torch.bfloat16)
    few, alone = queries(1, SHAPES[0], torch.bfloat16), decode((kept(6404, SHAPES[0], torch.bfloat16),))
    for q, step in ((q_THC, known), (few, alone)):
        backend = TritonCross()
        first = backend.attend(q, 0, step, SCALE)
        assert all(torch.equal(first, backend.attend(q, 0, step, SCALE)) for _ in range(500))


def test_never_waits_for_the_device() -> None:
    q_THC, known = mixed(SHAPES[0], torch.bfloat16)
    few, alone = queries(1, SHAPES[0], torch.bfloat16), decode((kept(6404, SHAPES[0], torch.bfloat16),))
    backend = TritonCross()
    for _ in range(2):
        backend.attend(q_THC, 0, known, SCALE)
        backend.attend(few, 0, alone, SCALE)
    # The plan of a step is made anew.
    known.extra.clear()
    alone.extra.clear()
    # PyTorch's "error" mode, without its warning that it is a prototype.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        for layer in range(LAYERS):
            backend.attend(q_THC, layer, known, SCALE)
            backend.attend(few, layer, alone, SCALE)
    finally:
        torch.cuda.set_sync_debug_mode("default")
