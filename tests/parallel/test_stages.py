"""Layers are cut into stages of nearly equal size, and never between a layer and one that reads its keys."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from beheld.core.config import KVGroup
from beheld.core.errors import ConfigError
from beheld.core.plan import EncodeItem
from beheld.parallel.stages import StagePlan, split
from beheld.runner.pipeline import bits_of, lost_of


@dataclasses.dataclass(frozen=True)
class Info:
    kv_groups: tuple[KVGroup, ...]


def info(readers: tuple[tuple[int, int], ...] = ()) -> Any:
    return SimpleNamespace(kv_groups=(KVGroup("full", (0, 1, 2, 3), 2, 8, 8, readers=readers),))


def test_the_largest_stage_is_as_small_as_possible() -> None:
    assert split([1] * 4, 0, 0, info(), 2) == (0, 2, 4)
    # The first stage has the embeddings, the last one the head.
    assert split([1] * 6, 2, 0, info(), 2) == (0, 2, 6)
    assert split([1] * 6, 0, 3, info(), 2) == (0, 4, 6)
    assert split([3, 1, 1, 1, 1, 1, 1], 0, 0, info(), 3) == (0, 1, 4, 7)


def test_a_reader_is_in_the_stage_of_its_source() -> None:
    assert split([1] * 6, 0, 0, info(((4, 2), (5, 3))), 2) == (0, 2, 6)
    with pytest.raises(ConfigError, match="cannot be cut into 4 stages"):
        split([1] * 6, 0, 0, info(((4, 2), (5, 3))), 4)


def test_stages_hold_their_layers_and_measure_by_the_widest() -> None:
    groups = (KVGroup("full", (1, 3, 4), 2, 8, 8), KVGroup("sliding", (0, 2), 2, 8, 8, window=4))
    whole: Any = Info(groups)
    first, last = StagePlan(0, (0, 3, 5)), StagePlan(1, (0, 3, 5))
    assert [group.layers for group in first.local(whole).kv_groups] == [(1,), (0, 2)]
    assert [group.layers for group in last.local(whole).kv_groups] == [(3, 4), ()]
    assert first.widest(whole) == last.widest(whole)
    assert [len(group.layers) for group in first.widest(whole).kv_groups] == [2, 2]


def test_items_that_a_stage_lost_are_told_however_many_there_are() -> None:
    items = [EncodeItem(bytes([number]), "image", {}, 1) for number in range(70)]
    for own in ([0, 3], [61], [69], [5, 69]):
        told = lost_of(bits_of([items[number].digest for number in own], items), items)
        assert {items[number].digest for number in own} <= set(told)
        assert all(items[number].digest not in told for number in range(61) if number not in own)
