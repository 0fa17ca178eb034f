"""The Triton kernels in Triton's interpreter, on a CPU; test_triton.py runs this file in a process of its own."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from beheld.attention.torch_ref import TorchBackend
from beheld.attention.triton_paged import TritonBackend
from tests.attention.naive import Case, expected, make_case

MIXED = [(7, 8), (31, 32), (300, 301), (0, 9), (5, 21), (16, 24), (30, 33)]
SPLIT = [(0, 1), (600, 601), (130, 131)]


def run(case: Case, softcap: float | None = None) -> torch.Tensor:
    """Two layers of one step: the second finds what the first left behind."""
    backend = TritonBackend()
    backend.begin(case.metadata)
    for _ in range(2):
        out = backend.attend(case.q_THC, case.k_TKC, case.v_TKC, case.kv, case.metadata, 0.3, softcap)
    return out


def check(case: Case, out: torch.Tensor, softcap: float | None = None) -> None:
    want = expected(case, 0.3, softcap)
    torch.testing.assert_close(out.double(), want, atol=3e-6, rtol=1e-5)
    slots = case.metadata.groups[0].slots_T
    assert torch.equal(case.kv.keys.flatten(0, 1)[slots], case.k_TKC)
    assert torch.equal(case.kv.values.flatten(0, 1)[slots], case.v_TKC)
    assert (case.kv.keys[0] == 0).all(), "the null block stays empty"


@pytest.mark.parametrize("pieces", [MIXED, SPLIT, [(0, 33)]], ids=["mixed", "split", "prefill"])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (1, None), (6, 5.0), (150, None)])
def test_equals_naive(pieces: list[tuple[int, int]], window: int | None, softcap: float | None) -> None:
    case = make_case(pieces, heads=6, kv_heads=2, window=window)
    check(case, run(case, softcap), softcap)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "block_size"), [(3, 3, 24, 16), (7, 1, 16, 32), (16, 1, 40, 64), (2, 1, 64, 16)]
)
def test_head_shapes(heads: int, kv_heads: int, size: int, block_size: int) -> None:
    case = make_case(MIXED[2:5], heads=heads, kv_heads=kv_heads, size=size, block_size=block_size)
    check(case, run(case))


def test_values_of_another_size_and_strided_inputs() -> None:
    case = make_case(MIXED, size=24)
    case.v_TKC = case.v_TKC[..., :16]
    case.kv.values = case.kv.values[..., :16].contiguous()
    case.history = [(k, v[..., :16]) for k, v in case.history]
    case.q_THC = case.q_THC.transpose(0, 1).contiguous().transpose(0, 1)
    case.k_TKC = case.k_TKC.transpose(1, 2).contiguous().transpose(1, 2)
    check(case, run(case))


def test_padding_rows_touch_nothing() -> None:
    """Rows that fill up a graph: length 1 or 0, slot 0, a table of null blocks."""
    case = make_case(SPLIT)
    keys = case.kv.keys.clone()
    case.metadata.lengths_B = torch.tensor([1, 1, 0], dtype=torch.int32)
    case.metadata.groups[0].slots_T.zero_()
    case.metadata.groups[0].tables_BN.zero_()
    out = run(case)
    torch.testing.assert_close(out, case.v_TKC.repeat_interleave(2, dim=1))
    assert torch.equal(case.kv.keys.isnan(), keys.isnan())
    assert torch.equal(case.kv.keys.nan_to_num(), keys.nan_to_num())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_one_request_s_nan_stays_its_own() -> None:
    case = make_case([(9, 10), (0, 21), (4, 11)])
    want = run(case)
    for sequence in range(3):
        own = slice(*case.metadata.cu_q_B1[sequence : sequence + 2].tolist())
        ill = dataclasses.replace(case, k_TKC=case.k_TKC.clone(), v_TKC=case.v_TKC.clone())
        ill.k_TKC[own], ill.v_TKC[own] = float("nan"), float("nan")
        out = run(ill)
        assert out[own].isnan().any()
        out[own] = want[own]
        assert torch.equal(out, want)


@pytest.mark.parametrize("window", [None, 9])
def test_ranges_read_both_ways(window: int | None) -> None:
    """Pictures that see all of themselves, at either end of what a step computes and across tiles of rows."""
    pieces = [(11, 12), (0, 50), (5, 21)]
    case, same = (make_case(pieces, heads=3, kv_heads=1, window=window) for _ in range(2))
    for one in (case, same):
        one.metadata.both_ways = ((), ((0, 20), (21, 50)), ((7, 16),))
    oracle = TorchBackend()
    oracle.begin(same.metadata)
    want = oracle.attend(same.q_THC, same.k_TKC, same.v_TKC, same.kv, same.metadata, 0.3, None)
    torch.testing.assert_close(run(case), want, atol=3e-6, rtol=1e-5)
    case.metadata.groups[0].ahead = "never"
    ahead_never = run(case)
    assert not torch.allclose(ahead_never, want), "the ranges change nothing: the test cannot fail"
    case.metadata.both_ways = ()
    assert torch.equal(run(case), ahead_never)
