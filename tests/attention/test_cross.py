"""Attention beside the text equals a plain softmax over the states that each token sees."""

from __future__ import annotations

import pytest
import torch

from beheld.attention import cross
from beheld.attention.cross import CrossMetadata, CrossRun, SDPACross, Sight, StackedCross
from beheld.attention.select import select_cross


def states(count: int, layers: int = 2, heads: int = 2, size: int = 8) -> torch.Tensor:
    return torch.randn(layers, 2, count, heads, size).movedim(2, 0)


def naive(q_HC: torch.Tensor, seen: list[torch.Tensor], layer: int, scale: float) -> torch.Tensor:
    """One token: keys and values of all that it sees, head by head."""
    kv = torch.cat([item[:, layer] for item in seen])
    group = q_HC.shape[0] // kv.shape[2]
    out = []
    for head, q_C in enumerate(q_HC):
        k_EC, v_EC = kv[:, 0, head // group], kv[:, 1, head // group]
        out.append(torch.softmax(k_EC @ q_C * scale, dim=0) @ v_EC)
    return torch.stack(out)


def test_every_run_sees_its_own_states_and_the_rest_nothing() -> None:
    torch.manual_seed(0)
    a, b = states(5), states(11)
    seen = {0: [a], 1: [a, b], 2: [a, b], 3: [b[:4]], 5: [a]}
    runs = (
        CrossRun(torch.tensor([0, 5]), (a,)),
        CrossRun(slice(1, 3), (a, b)),
        CrossRun(slice(3, 4), (b[:4],)),
    )
    q_THC = torch.randn(6, 4, 8)
    for layer in (0, 1):
        out_THC = select_cross("cpu").attend(q_THC, layer, CrossMetadata(runs, torch.ones(6)), 0.3)
        assert (out_THC[4] == 0).all()
        for token, items in seen.items():
            torch.testing.assert_close(out_THC[token], naive(q_THC[token], items, layer, 0.3))


def test_the_backend_is_chosen_by_name() -> None:
    assert isinstance(select_cross("cuda"), SDPACross)
    assert isinstance(select_cross("cpu"), StackedCross)


def decode(*seen: tuple[torch.Tensor, ...]) -> CrossMetadata:
    """One token each."""
    runs = tuple(CrossRun(slice(b, b + 1), items) for b, items in enumerate(seen))
    return CrossMetadata(runs, torch.ones(len(seen)))


def test_decoding_tokens_attend_together_whatever_they_see() -> None:
    torch.manual_seed(1)
    a, b, c = states(5), states(11), states(3)
    backend, q_THC = StackedCross(), torch.randn(4, 4, 8)
    # The same states again, others of the same sizes, fewer sequences, several items, and beginnings of items.
    steps = [((a,), (b,), (c,)), ((a,), (b,), (c,)), ((states(5),), (b,), (c,)), ((b,), (c,)), ((a, c), (b,), (a[:2],))]
    for seen in steps:
        metadata = decode(*seen)
        for layer in (0, 1):
            out_THC = backend.attend(q_THC[: len(seen)], layer, metadata, 0.3)
            for token, items in enumerate(seen):
                torch.testing.assert_close(out_THC[token], naive(q_THC[token], list(items), layer, 0.3))


@pytest.mark.parametrize("more", [1, 3])
def test_tokens_behind_those_that_see_something_see_nothing(more: int) -> None:
    torch.manual_seed(2)
    a, b = states(5), states(11)
    q_THC = torch.randn(2 + more, 4, 8)
    out_THC = StackedCross().attend(q_THC, 0, CrossMetadata(decode((a,), (b,)).runs, torch.ones(2 + more)), 0.3)
    for token, item in enumerate((a, b)):
        torch.testing.assert_close(out_THC[token], naive(q_THC[token], [item], 0, 0.3))
    assert (out_THC[2:] == 0).all()


def test_a_stack_is_made_once_for_the_same_states(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    stacked = cross._stacked
    monkeypatch.setattr(cross, "_stacked", lambda runs: made.append(len(runs)) or stacked(runs))
    a, b, backend, q_THC = states(5), states(11), StackedCross(), torch.randn(2, 4, 8)
    for _ in range(3):
        # Every step has views of its own.
        metadata = decode((a[:5],), (b[:11],))
        for layer in (0, 1):
            backend.attend(q_THC, layer, metadata, 0.3)
    assert made == [2]
    # What is shorter lies at the same place, and is another thing.
    backend.attend(q_THC, 0, decode((a[:4],), (b[:11],)), 0.3)
    assert made == [2, 2]
    backend.attend(q_THC[:1], 0, decode((a,)), 0.3)
    assert backend._kept is None


def test_states_that_are_large_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross, "_STACK_BYTES", 2 * 11 * states(1).numel() * 4 - 1)
    a, b, backend, q_THC = states(5), states(11), StackedCross(), torch.randn(2, 4, 8)
    out_THC = backend.attend(q_THC, 0, decode((a,), (b,)), 0.3)
    assert backend._kept is None
    torch.testing.assert_close(out_THC[1], naive(q_THC[1], [b], 0, 0.3))
    backend.attend(q_THC, 0, decode((a,), (a,)), 0.3)
    assert backend._kept is not None


def test_a_sight_without_end_covers_the_answer() -> None:
    assert [Sight(2, 4, 1).covers(p) for p in range(6)] == [False, False, True, True, False, False]
    assert Sight(2, None, 1).covers(10**9)
