"""Attention beside the text equals a plain softmax over the states that each token sees."""

from __future__ import annotations

import torch

from beheld.attention.cross import CrossMetadata, CrossRun, SDPACross, Sight
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
    assert select_cross("cpu").name == "sdpa"


def test_a_sight_without_end_covers_the_answer() -> None:
    assert [Sight(2, 4, 1).covers(p) for p in range(6)] == [False, False, True, True, False, False]
    assert Sight(2, None, 1).covers(10**9)
