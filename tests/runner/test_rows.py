"""What rows tell a device that keeps a copy of the block tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from beheld.core.plan import Admission, SeqSlice
from beheld.core.sampling import Sampling
from beheld.runner.rows import Rows

NUM_ROWS, NUM_GROUPS, WIDTH, BLOCK_SIZE = 3, 2, 8, 4


class FakeAdapter:
    """What rows ask of a model without adapters."""

    device = torch.device("cpu")
    lora = None
    position_unit = 1

    def positions(self, token_ids: Sequence[int], spans: Any, second: Any = None) -> tuple[np.ndarray, int]:
        return np.arange(len(token_ids))[None], 0

    def cross_views(self, spans: Any, num_prompt: int) -> tuple[()]:
        return ()


def make_rows() -> Rows:
    return Rows(FakeAdapter(), NUM_ROWS, NUM_GROUPS, WIDTH)  # type: ignore[arg-type]


def admit(rows: Rows, row: int, blocks: Sequence[Sequence[int]]) -> None:
    tokens = (1,) * 4
    rows.admit(Admission(row, tokens, 4, (), Sampling(), None, 0, tuple(tuple(own) for own in blocks)))


def append(rows: Rows, row: int, after: int, blocks: Sequence[Sequence[int]]) -> None:
    """The row's tables now have `after` blocks, the last of them new."""
    stop = after * BLOCK_SIZE
    rows.append_blocks(SeqSlice(row, stop - 1, stop, tuple(tuple(own) for own in blocks), 1), BLOCK_SIZE)


blocks = st.lists(st.integers(1, 999), max_size=4)
per_group = st.lists(blocks, min_size=NUM_GROUPS, max_size=NUM_GROUPS)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("admit"), st.integers(0, NUM_ROWS - 1), per_group),
        st.tuples(st.just("append"), st.integers(0, NUM_ROWS - 1), st.integers(4, WIDTH), per_group),
        st.tuples(st.just("release"), st.integers(0, NUM_ROWS - 1)),
        st.tuples(st.just("take")),
    ),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(operations, st.randoms(use_true_random=False))
def test_changes_in_any_order_give_the_host_s_tables(operations: list[Any], chance: Any) -> None:
    rows = make_rows()
    copy = rows.tables_GRN.copy()

    def take() -> None:
        changes = rows.changes()
        if changes is not None:
            index, values = changes
            assert len(set(index.tolist())) == len(index), "a device may apply two writes to one place in any order"
            order = list(range(len(index)))
            chance.shuffle(order)
            for i in order:
                copy.reshape(-1)[index[i]] = values[i]
        assert (copy == rows.tables_GRN).all()
        rows.forget_changes()
        assert rows.changes() is None

    for name, *rest in operations:
        if name == "admit":
            admit(rows, *rest)
        elif name == "append":
            append(rows, *rest)
        elif name == "release":
            rows.release(*rest)
        else:
            take()
    take()


def test_a_row_that_is_taken_anew_has_its_own_blocks_alone() -> None:
    rows = make_rows()
    admit(rows, 0, ((5, 6, 7), (8,)))
    rows.release(0)
    admit(rows, 0, ((9, 10), (11,)))
    changes = rows.changes()
    assert changes is not None
    for order in (changes, changes[:, ::-1]):
        told = dict(zip(*order.tolist(), strict=True))
        assert (told[0], told[1], told[NUM_ROWS * WIDTH]) == (9, 10, 11)


def test_changes_that_nobody_takes_are_bounded() -> None:
    """Answers of one token never come to a step in which all sequences decode."""
    rows = make_rows()
    for _ in range(1000):
        admit(rows, 0, ((1, 2), (3,)))
        append(rows, 0, 4, ((4, 5), (6,)))
        rows.release(0)
    assert len(rows._changed) <= NUM_ROWS * NUM_GROUPS
    changes = rows.changes()
    assert changes is not None
    assert changes.shape[1] <= rows.tables_GRN.size
