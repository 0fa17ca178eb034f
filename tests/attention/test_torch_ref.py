"""The CPU backend against attention written out plainly."""

from __future__ import annotations

import pytest
import torch

from beheld.attention.torch_ref import TorchBackend
from tests.attention.naive import beside, biases, expected, make_case, sinks

DECODES = [(0, 1), (5, 6), (8, 9), (40, 41)]
MIXED = [(7, 8), (31, 32), (0, 9), (5, 21), (16, 24), (30, 33)]


@pytest.mark.parametrize("pieces", [DECODES, MIXED, [(0, 33)], [(12, 13)]], ids=["decodes", "mixed", "prefill", "one"])
@pytest.mark.parametrize("window", [None, 1, 6, 16, 64])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
def test_equals_naive(
    pieces: list[tuple[int, int]], window: int | None, softcap: float | None, heads: int, kv_heads: int
) -> None:
    case = make_case(pieces, heads=heads, kv_heads=kv_heads, window=window)
    backend = TorchBackend()
    backend.begin(case.metadata)
    out = backend.attend(case.q_THC, case.k_TKC, case.v_TKC, case.kv, case.metadata, 0.3, softcap)
    assert not out.isnan().any()
    torch.testing.assert_close(out.double(), expected(case, 0.3, softcap), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("pieces", [DECODES, MIXED, [(0, 33)], [(12, 13)]], ids=["decodes", "mixed", "prefill", "one"])
@pytest.mark.parametrize("chunk", [1, 6, 16, 64])
def test_a_chunk_hides_what_was_before_it(pieces: list[tuple[int, int]], chunk: int) -> None:
    case = make_case(pieces, window=chunk, chunk=chunk)
    backend = TorchBackend()
    backend.begin(case.metadata)
    out = backend.attend(case.q_THC, case.k_TKC, case.v_TKC, case.kv, case.metadata, 0.3, None)
    torch.testing.assert_close(out.double(), expected(case, 0.3, None), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("pieces", [DECODES, MIXED, [(0, 33)], [(12, 13)]], ids=["decodes", "mixed", "prefill", "one"])
@pytest.mark.parametrize("window", [None, 1, 6])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
def test_sinks_take_a_share_of_every_query(
    pieces: list[tuple[int, int]],
    window: int | None,
    softcap: float | None,
    heads: int,
    kv_heads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Few rows of a prompt at a time, so that there are several parts of it.
    monkeypatch.setattr("beheld.attention.torch_ref._MOST_SCORES", 4 * heads * 33)
    case, sinks_H = make_case(pieces, heads=heads, kv_heads=kv_heads, window=window), sinks(heads)
    backend = TorchBackend()
    backend.begin(case.metadata)
    out = backend.attend(case.q_THC, case.k_TKC, case.v_TKC, case.kv, case.metadata, 0.3, softcap, sinks_H)
    torch.testing.assert_close(out.double(), expected(case, 0.3, softcap, sinks_H), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("pieces", [DECODES, MIXED, [(0, 33)], [(12, 13)]], ids=["decodes", "mixed", "prefill", "one"])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("extra", ["bias", "beside", "both"])
def test_a_bias_by_distance_and_what_stands_beside(
    pieces: list[tuple[int, int]], window: int | None, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("beheld.attention.torch_ref._MOST_SCORES", 4 * 4 * 33)
    case = make_case(pieces, window=window)
    T, H, C = case.q_THC.shape
    bias_HD = None if extra == "beside" else biases(H)
    other = None if extra == "bias" else beside(T, H, C)
    backend = TorchBackend()
    backend.begin(case.metadata)
    out = backend.attend(
        case.q_THC, case.k_TKC, case.v_TKC, case.kv, case.metadata, 0.3, None, None, bias_HD, other
    )  # fmt: skip
    wanted = expected(case, 0.3, None, None, bias_HD, other)
    torch.testing.assert_close(out.double(), wanted, atol=2e-6, rtol=1e-5)


def test_stores_keys_and_values_where_the_slots_say() -> None:
    case = make_case(MIXED)
    backend = TorchBackend()
    backend.begin(case.metadata)
    backend.attend(case.q_THC, case.k_TKC, case.v_TKC, case.kv, case.metadata, 1.0, None)
    slots = case.metadata.groups[0].slots_T
    assert torch.equal(case.kv.keys.flatten(0, 1)[slots], case.k_TKC)
    assert torch.equal(case.kv.values.flatten(0, 1)[slots], case.v_TKC)
    assert (case.kv.keys[0] == 0).all(), "the null block stays empty"
