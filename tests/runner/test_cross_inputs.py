"""The states that a step's tokens attend to, whether they are looked up again or known from the step before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from beheld.attention.cross import CrossView
from beheld.core.plan import Admission, SeqSlice, SpanView
from beheld.core.sampling import Sampling
from beheld.runner.cross_inputs import gather
from beheld.runner.rows import Rows
from tests.runner.test_rows import NUM_GROUPS, NUM_ROWS, WIDTH, FakeAdapter

STATES = {b"a": 5, b"b": 3}
# Item a from position 4 to 9, b from 9 on with two of its three states.
VIEWS = (CrossView(4, 9, 5), CrossView(9, None, 2))


class CrossAdapter(FakeAdapter):
    """Its prompts have two items."""

    def cross_views(self, spans: Any, num_prompt: int) -> Any:
        return VIEWS


class Store:
    """An encoder cache's states, each with a number of its own."""

    def __init__(self) -> None:
        self.embeds = {name: torch.rand(count, 1, 2, 1, 1) for name, count in STATES.items()}

    def states(self, span: SpanView) -> Tensor:
        return self.embeds[span.digest]


def spans() -> tuple[SpanView, ...]:
    places = ((b"a", 4, 5), (b"b", 9, 10))
    return tuple(SpanView("image", name, start, stop, None, 0, {}, STATES[name]) for name, start, stop in places)


def admitted() -> Rows:
    rows = Rows(CrossAdapter(), NUM_ROWS, NUM_GROUPS, WIDTH)  # type: ignore[arg-type]
    for row in range(2):
        rows.admit(Admission(row, (1,) * 12, 12, spans(), Sampling(), None, 0, ((1, 2, 3),) * NUM_GROUPS))
    return rows


def sees(position: int) -> tuple[list[tuple[bytes, int]], bool]:
    if position < 4:
        return [(b"a", 5), (b"b", 3)], False
    return ([(b"a", 5)] if position < 9 else [(b"b", 2)]), True


@pytest.mark.parametrize("order", [range(20), reversed(range(20)), (15, 3, 16, 9, 8)])
def test_each_position_sees_what_it_saw_whichever_was_asked_before(order: Any) -> None:
    rows, store = admitted(), Store()
    for position in order:
        slices = [SeqSlice(row, position, position + 1, (), 1) for row in range(2)]
        found = gather(slices, [0, 1], rows, store)  # type: ignore[arg-type]
        wanted, shown = sees(position)
        assert found is not None
        (run,) = found.runs
        assert run.ranges == ((0, 1), (1, 2))
        assert [len(s) for s in run.states] == [count for _, count in wanted]
        assert [s.data_ptr() for s in run.states] == [store.embeds[name].data_ptr() for name, _ in wanted]
        assert found.sighted_T.tolist() == [float(shown)] * 2


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_prompt_in_two_parts_sees_the_same(cut: int) -> None:
    rows, store = admitted(), Store()
    found: dict[int, tuple[list[int], float]] = {}
    for start, stop in ((0, cut), (cut, 12), (12, 13)):
        made = gather([SeqSlice(0, start, stop, (), 1)], [0], rows, store)  # type: ignore[arg-type]
        assert made is not None
        for run in made.runs:
            for low, high in run.ranges:
                for place in range(low, high):
                    found[start + place] = [len(s) for s in run.states], float(made.sighted_T[place])
    assert found == {
        position: ([count for _, count in sees(position)[0]], float(sees(position)[1])) for position in range(13)
    }


def test_a_row_that_is_taken_again_is_looked_up_again() -> None:
    rows, store = admitted(), Store()
    assert gather([SeqSlice(0, 12, 13, (), 1)], [0], rows, store) is not None  # type: ignore[arg-type]
    rows.release(0)
    rows.admit(Admission(0, (1,) * 12, 12, (), Sampling(), None, 0, ((1, 2, 3),) * NUM_GROUPS))
    assert rows[0].last_view is None
