"""The kernel for long prompts on a Hopper GPU: against attention in float64, and that the backend takes it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from beheld.attention import hopper_prefill, triton_paged
from tests.gpu.test_triton_paged import HALF, LONG, MIXED, USUAL, Shape, check, make, run

# Heads, key-value heads, size, block size.
SHAPES: list[tuple[Shape, torch.dtype]] = [
    (USUAL, HALF),
    ((28, 4, 128, 32), HALF),
    ((14, 2, 64, 16), HALF),
    ((8, 8, 128, 16), torch.float16),
    ((6, 1, 64, 64), torch.float16),
]
PIECES = {
    "one": [(0, 3000)],
    # Sequences that end within a tile: what follows is another's.
    "unlike": [(0, 700), (0, 2513), (0, 1024), (0, 2049)],
    # Prefixes of whole tiles, of none, and of a part of one.
    "prefixes": [(2048, 4097), (5, 3000), (2999, 3100), (1024, 1025 + 128)],
    "mixed": [*MIXED, (2000, 5000)],
    "long": [*LONG, (0, 8192)],
}


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many prompts' tiles each launch had."""
    calls: list[int] = []
    prefill = hopper_prefill.prefill

    def called(*args: Any) -> None:
        calls.append(args[6].shape[0])
        prefill(*args)

    monkeypatch.setattr(hopper_prefill, "prefill", called)
    return calls


@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES)
@pytest.mark.parametrize(("shape", "dtype"), SHAPES, ids=str)
def test_equals_float64(
    pieces: list[tuple[int, int]], shape: Shape, dtype: torch.dtype, counted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hopper_prefill, "is_long", lambda pieces: True)
    case = make(pieces, shape, dtype)
    assert hopper_prefill.takes(case.q_THC, case.k_TKC, case.v_TKC, case.kv)
    counted.clear()
    check(case, run(case))
    assert len(counted) == 2, "one launch a layer"


def test_prompts_that_see_few_keys_are_left_to_the_other_kernel(counted: list[int]) -> None:
    for pieces, launches in (([(0, 1024)] * 4, 0), ([(0, 4096)], 2), ([(3800, 4096)] * 2, 2)):
        case = make(pieces, USUAL, HALF)
        hopper_prefill.takes(case.q_THC, case.k_TKC, case.v_TKC, case.kv)
        counted.clear()
        check(case, run(case))
        assert len(counted) == launches


def test_windows_and_soft_caps_are_left_to_the_other_kernel(counted: list[int]) -> None:
    windowed = make([(0, 4096)], USUAL, HALF, window=300)
    capped = make([(0, 4096)], USUAL, HALF)
    hopper_prefill.takes(capped.q_THC, capped.k_TKC, capped.v_TKC, capped.kv)
    counted.clear()
    check(windowed, run(windowed))
    check(capped, run(capped, softcap=5.0), softcap=5.0)
    assert not counted


def test_heads_apart(counted: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers' layers give them, once compiled."""
    monkeypatch.setattr(hopper_prefill, "is_long", lambda pieces: True)
    case = make(PIECES["prefixes"], USUAL, HALF)
    given = case.q_THC, case.k_TKC, case.v_TKC
    case.q_THC, case.k_TKC, case.v_TKC = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in given)
    assert hopper_prefill.takes(case.q_THC, case.k_TKC, case.v_TKC, case.kv)
    counted.clear()
    check(case, run(case))
    assert len(counted) == 2


def test_strided_queries_keys_and_values(counted: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """As a joined product gives them."""
    monkeypatch.setattr(hopper_prefill, "is_long", lambda pieces: True)
    case = make(PIECES["prefixes"], USUAL, HALF)
    joined = torch.cat([case.q_THC, case.k_TKC, case.v_TKC], 1)
    case.q_THC, case.k_TKC, case.v_TKC = joined.split((16, 2, 2), 1)
    assert hopper_prefill.takes(case.q_THC, case.k_TKC, case.v_TKC, case.kv)
    counted.clear()
    check(case, run(case))
    assert len(counted) == 2


def test_a_kernel_that_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(hopper_prefill, "prefill", lambda *args: args[3].zero_())
    hopper_prefill._works.cache_clear()
    case = make([(0, 4096)], USUAL, HALF)
    try:
        check(case, run(case))
        assert "wrong results" in caplog.text
    finally:
        hopper_prefill._works.cache_clear()


def test_without_gluon_the_other_kernel_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_paged, "hopper_prefill", None)
    case = make([(0, 4096)], USUAL, HALF)
    check(case, run(case))
