"""FlashAttention-3, where it is installed: what it computes is attention, for every shape that it is trusted with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from beheld.attention import flash, tower
from beheld.platform.registry import platform_of
from tests.attention.naive import Case
from tests.gpu.test_triton_paged import HALF, LONG, MIXED, ROUNDING, USUAL, Shape, check, make

CUDA = platform_of("cuda")
WHOLE = [(0, 700), (0, 513), (0, 1024), (0, 64)]
# Heads, key-value heads, size, block size.
SHAPES: list[Shape] = [
    (8, 8, 64, 16),
    (14, 2, 64, 32),
    (4, 2, 80, 16),
    (8, 2, 96, 64),
    (6, 2, 112, 16),
    (16, 1, 128, 16),
    (28, 4, 128, 16),
    (8, 4, 192, 16),
    (16, 2, 256, 32),
]


class Counted:
    """FlashAttention-3, and how often it was asked."""

    def __init__(self, found: flash.Flash) -> None:
        self.calls, self._found = 0, found

    def __call__(self, *args: Any, **options: Any) -> Tensor:
        self.calls += 1
        return self._found(*args, **options)


@pytest.fixture
def counted() -> Counted:
    found = flash.installed(CUDA)
    if found is None:
        pytest.skip("FlashAttention-3 is not installed")
    return Counted(found)


def attend(case: Case, counted: Counted, softcap: float | None = None) -> Tensor:
    """Two layers of one step, of which neither may lose what it stores."""
    backend = flash.FlashBackend(counted, CUDA)
    backend.begin(case.metadata)
    for _ in range(2):
        # Memory that a result is made in holds NaN: what is not written shows.
        torch.full((case.q_THC.numel(),), float("nan"), dtype=HALF, device="cuda")
        out = backend.attend(case.q_THC, case.k_TKC, case.v_TKC, case.kv, case.metadata, 0.1, softcap)
    return out


@pytest.mark.parametrize("pieces", [WHOLE, [(0, 8192)], [(0, 512)] * 16], ids=["unlike", "8192", "many"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_float64(shape: Shape, pieces: list[tuple[int, int]], counted: Counted) -> None:
    case = make(pieces, shape, HALF)
    check(case, attend(case, counted))
    heads, kv_heads, size, _ = shape
    assert counted.calls == (2 if flash.computes(CUDA, size, heads // kv_heads, 0.0) else 0)


@pytest.mark.parametrize("softcap", [5.0, 50.0])
def test_soft_caps(softcap: float, counted: Counted) -> None:
    case = make(WHOLE, USUAL, HALF)
    check(case, attend(case, counted, softcap), softcap)
    assert counted.calls == (2 if flash.computes(CUDA, 128, 8, softcap) else 0)


@pytest.mark.parametrize("pieces", [MIXED, LONG], ids=["mixed", "long"])
def test_steps_with_prefixes_are_left_to_triton(pieces: list[tuple[int, int]], counted: Counted) -> None:
    case = make(pieces, USUAL, HALF)
    check(case, attend(case, counted))
    assert not counted.calls


def test_heads_of_128_are_computed(counted: Counted) -> None:
    """Those of the shapes in docs/explanation/measurements.md: a build without them would do nothing."""
    assert flash.computes(CUDA, 128, 8, 0.0)
    assert flash.computes(CUDA, 128, 7, 0.0)


@pytest.mark.parametrize(
    "lengths", [[1024] * 3, [256, 300, 1], [64] * 40, [5000]], ids=["large", "unlike", "short", "one"]
)
@pytest.mark.parametrize("size", [64, 72, 80, 128])
def test_windows_of_a_tower(size: int, lengths: list[int], counted: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the function that transformers' towers call, from strided heads as they give them."""
    assert tower.register("flash") != tower.register("triton")
    monkeypatch.setattr(flash, "installed", lambda platform: counted)
    generator = torch.Generator("cuda").manual_seed(0)
    heads = torch.randn(1, sum(lengths), 3, 5, size, generator=generator, device="cuda", dtype=HALF)
    q, k, v = heads.transpose(1, 3).unbind(2)
    bounds = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    # Trying a size for the first time is a call as well.
    worth = sum(lengths) >= flash._LONG_WINDOW * len(lengths) and flash.computes(CUDA, size, 1, 0.0)
    counted.calls = 0
    found, _ = tower._by_flash(None, q, k, v, None, 0.2, cu_seq_lens_q=bounds)
    other, _ = tower._by_triton(None, q, k, v, None, 0.2, cu_seq_lens_q=bounds)
    assert counted.calls == (1 if worth else 0)
    for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        q_HLC, k_HLC, v_HLC = (x[0, :, start:stop].double() for x in (q, k, v))
        want = (torch.softmax(q_HLC @ k_HLC.transpose(1, 2) * 0.2, -1) @ v_HLC).transpose(0, 1)
        for out in (found, other):
            assert (out[0, start:stop].double() - want).norm() <= ROUNDING[HALF] * want.norm()
