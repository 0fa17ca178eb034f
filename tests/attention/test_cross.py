"""Attention beside the text equals a plain softmax over the states that each token sees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from beheld.attention import cross
from beheld.attention.backend import Further
from beheld.attention.cross import CrossMetadata, CrossRun, CrossView, SDPACross, StackedCross
from beheld.attention.select import select_cross
from beheld.platform.cuda import Cuda
from beheld.platform.registry import CPU, platform_of
from beheld.platform.triton import HAS_TRITON
from tests.attention.cross_reference import decode, expected, metadata, states


def check(backend: cross.CrossBackend, q_THC: torch.Tensor, known: CrossMetadata) -> None:
    """Both layers of one step."""
    for layer in (0, 1):
        out_THC = backend.attend(q_THC, layer, known, 0.3)
        torch.testing.assert_close(out_THC.double(), expected(q_THC, layer, known, 0.3), atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize("backend", [SDPACross(), StackedCross()], ids=lambda backend: backend.name)
def test_every_run_sees_its_own_states_and_the_rest_nothing(backend: cross.CrossBackend) -> None:
    torch.manual_seed(0)
    a, b = states(5), states(11)
    known = metadata(6, (((0, 1), (5, 6)), (a,)), (((1, 3),), (a, b)), (((3, 4),), (b[:4],)))
    q_THC = torch.randn(6, 4, 8)
    check(backend, q_THC, known)
    assert (backend.attend(q_THC, 0, known, 0.3)[4] == 0).all()


def test_sums_tell_what_share_states_have() -> None:
    """A softmax over the states and one more score of 0 leaves them the share that their sums tell."""
    torch.manual_seed(3)
    known = metadata(5, (((0, 1), (3, 5)), (states(5), states(11))), (((1, 2),), (states(3),)))
    q_THC = torch.randn(5, 4, 8)
    for layer in (0, 1):
        found = cross.attend_with_sums(q_THC, layer, known, 0.3)
        torch.testing.assert_close(found.values_THC.double(), expected(q_THC, layer, known, 0.3), atol=3e-6, rtol=1e-5)
        for run in known.runs:
            k_EKC = torch.cat([item[:, layer, 0] for item in run.states]).repeat_interleave(2, dim=1)
            rows = [token for low, high in run.ranges for token in range(low, high)]
            scores_PHE = torch.einsum("phc,ehc->phe", q_THC[rows] * 0.3, k_EKC)
            torch.testing.assert_close(found.sums_TH[rows], scores_PHE.exp().sum(-1).log())
        assert found.sums_TH[2].isneginf().all()
        assert not found.values_THC[2].any()


def test_decoding_tokens_get_their_sums_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """As run by run, which is left for what decodes alone."""
    torch.manual_seed(4)
    a, b, backend, q_THC = states(5), states(11), StackedCross(), torch.randn(5, 4, 8)
    left: list[int] = []
    by_run = cross._attend_runs_with_sums

    def counted(q_THC: torch.Tensor, further: Further, runs: Sequence[CrossRun], *rest: Any) -> None:
        left.append(len(runs))
        by_run(q_THC, further, runs, *rest)

    mixed = metadata(5, (((0, 1),), (a,)), (((1, 2),), (b, a)), (((2, 4),), (b[:4],)))
    for known, runs in ((decode((a,), (b,), (a, b)), []), (mixed, [1, 1]), (decode((a,)), [1, 1])):
        tokens = len(known.sighted_T)
        for layer in (0, 1):
            want = cross.attend_with_sums(q_THC[:tokens], layer, known, 0.3)
            with monkeypatch.context() as within:
                within.setattr(cross, "_attend_runs_with_sums", counted)
                found = backend.attend_with_sums(q_THC[:tokens], layer, known, 0.3)
            torch.testing.assert_close(found.sums_TH, want.sums_TH)
            torch.testing.assert_close(found.values_THC, want.values_THC, atol=3e-6, rtol=1e-5)
        assert left == runs
        left.clear()


def test_the_backend_is_chosen_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(select_cross(CPU), StackedCross)
    if HAS_TRITON:
        assert select_cross(platform_of("cuda")).name == "triton"
    monkeypatch.setattr("beheld.platform.cuda.HAS_TRITON", False)
    assert isinstance(select_cross(Cuda()), SDPACross)


def test_decoding_tokens_attend_together_whatever_they_see() -> None:
    torch.manual_seed(1)
    a, b, c = states(5), states(11), states(3)
    backend, q_THC = StackedCross(), torch.randn(4, 4, 8)
    # The same states again, others of the same sizes, fewer sequences, several items, and beginnings of items.
    steps = [((a,), (b,), (c,)), ((a,), (b,), (c,)), ((states(5),), (b,), (c,)), ((b,), (c,)), ((a, c), (b,), (a[:2],))]
    for seen in steps:
        check(backend, q_THC[: len(seen)], decode(*seen))


@pytest.mark.parametrize("more", [1, 3])
def test_tokens_behind_those_that_see_something_see_nothing(more: int) -> None:
    torch.manual_seed(2)
    q_THC = torch.randn(2 + more, 4, 8)
    check(StackedCross(), q_THC, decode((states(5),), (states(11),)))


def test_a_stack_is_made_once_for_the_same_states(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    stacked = cross._stacked
    monkeypatch.setattr(cross, "_stacked", lambda runs: made.append(len(runs)) or stacked(runs))
    a, b, backend, q_THC = states(5), states(11), StackedCross(), torch.randn(2, 4, 8)
    for _ in range(3):
        # Every step has views of its own.
        known = decode((a[:5],), (b[:11],))
        for layer in (0, 1):
            backend.attend(q_THC, layer, known, 0.3)
    assert made == [2]
    # What is shorter lies at the same place, and is another thing.
    backend.attend(q_THC, 0, decode((a[:4],), (b[:11],)), 0.3)
    assert made == [2, 2]
    backend.attend(q_THC[:1], 0, decode((a,)), 0.3)
    assert backend._kept is None


def test_states_that_are_large_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross, "_STACK_BYTES", 2 * 11 * states(1).numel() * 4 - 1)
    a, b, backend, q_THC = states(5), states(11), StackedCross(), torch.randn(2, 4, 8)
    check(backend, q_THC, decode((a,), (b,)))
    assert backend._kept is None
    backend.attend(q_THC, 0, decode((a,), (a,)), 0.3)
    assert backend._kept is not None


def test_a_sight_without_end_covers_the_answer() -> None:
    assert [CrossView(2, 4, 1).covers(p) for p in range(6)] == [False, False, True, True, False, False]
    assert CrossView(2, None, 1).covers(10**9)
