"""Which neighbours share their first blocks."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from beheld.attention.backend import Sharing
from beheld.runner.shared_prefixes import SharedPrefixes

SIZE, NEIGHBOURS, LEAST = 4, 4, 8


def find(tables: list[list[int]] | list[list[list[int]]], starts: list[int], total: int = 1) -> list[int] | None:
    """Search; `tables` of one group, or of several."""
    groups: Any = tables if isinstance(tables[0][0], list) else [tables]
    width = max(len(table) for group in groups for table in group)
    padded = np.array([[table + [0] * (width - len(table)) for table in group] for group in groups], dtype=np.int32)
    rows: Any = SimpleNamespace(tables_GRN=padded, num_admitted=len(starts))
    it = SharedPrefixes(rows, list(range(len(groups))), SIZE, Sharing(NEIGHBOURS, LEAST, total))
    shared = it.find(np.arange(len(starts)), np.array(starts))
    return None if shared is None else shared.tolist()


def test_members_share_what_all_of_them_have() -> None:
    assert find([[5, 9, 2, 7], [5, 9, 2, 8], [5, 9, 4], [6, 3]], [15, 14, 11, 7]) == [8, 8, 8, 0]


def test_it_takes_the_length_that_saves_most() -> None:
    long = [1, 2, 3, 4, 5, 6, 7, 8]
    # Three that share two blocks save four of reading, two that share seven save seven.
    assert find([[*long, 9], [*long[:7], 10], [1, 2, 11]], [34, 31, 11]) == [28, 28, 0]


def test_what_stands_behind_a_sequence_s_end_in_its_table_does_not_count() -> None:
    assert find([[5, 9, 2, 7], [5, 9, 2, 7]], [15, 9]) == [8, 8]
    assert find([[5, 9, 2, 7], [5, 9, 2, 7]], [15, 7]) is None


def test_too_few_blocks_and_other_neighbours_share_nothing() -> None:
    assert find([[5, 9, 2], [5, 8, 3]], [11, 11]) is None
    assert find([[5, 9], [1, 2], [3, 4], [6, 7], [5, 9]], [8, 8, 8, 8, 8]) is None
    assert find([[0, 0, 2], [0, 0, 3]], [11, 11]) is None


def test_little_in_all_is_not_worth_it() -> None:
    assert find([[5, 9, 2], [5, 9, 3]], [11, 11], total=16) == [8, 8]
    assert find([[5, 9, 2], [5, 9, 3]], [11, 11], total=17) is None


def test_the_first_neighbour_need_not_be_one_of_them() -> None:
    assert find([[1, 2], [5, 9], [5, 9], [3, 4], [7, 8], [6, 5], [6, 5]], [8] * 7) == [0, 8, 8, 0, 0, 8, 8]


def test_all_groups_must_agree() -> None:
    first, second = [[5, 9, 2], [5, 9, 2]], [[3, 4, 6], [3, 4, 7]]
    assert find([first, second], [12, 12]) == [8, 8]
    assert find([first, [[3, 4], [3, 5]]], [12, 12]) is None


def test_what_was_found_is_kept_until_a_sequence_is_admitted() -> None:
    rows: Any = SimpleNamespace(tables_GRN=np.array([[[5, 9], [5, 9]]], dtype=np.int32), num_admitted=2)
    it = SharedPrefixes(rows, [0], SIZE, Sharing(NEIGHBOURS, LEAST, 1))
    two = np.arange(2)
    assert it.find(two, np.array([8, 8])).tolist() == [8, 8]
    rows.tables_GRN[0, 1, 0] = 7
    rows.num_admitted += 1
    assert it.find(two, np.array([9, 9])) is None
    assert it.find(np.array([0, 0]), np.array([8, 8])).tolist() == [8, 8]


@pytest.mark.parametrize("seed", range(20))
def test_neighbours_have_equal_blocks_as_far_as_they_share(seed: int) -> None:
    rng = random.Random(seed)
    tables = [[rng.randrange(1, 3) for _ in range(6)] for _ in range(11)]
    starts = [rng.randrange(0, 24) for _ in tables]
    shared = find(tables, starts) or [0] * 11
    for first in range(0, 11, NEIGHBOURS):
        members = [i for i in range(first, min(first + NEIGHBOURS, 11)) if shared[i]]
        assert len(members) != 1
        for i in members:
            assert LEAST <= shared[i] == shared[members[0]] <= starts[i]
            assert tables[i][: shared[i] // SIZE] == tables[members[0]][: shared[i] // SIZE]
