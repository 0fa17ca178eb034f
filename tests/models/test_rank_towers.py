"""Towers that ranks share out: an error of all ranks is an item's, an error of one rank alone ends the engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from beheld.core.errors import EngineDeadError, StepError
from beheld.core.plan import EncodeItem
from beheld.models import rank_towers
from beheld.models.rank_towers import RankTowers
from beheld.parallel.group import RankGroup

ITEMS = [EncodeItem(b"x" * 32, "image", {}, 2)]


@pytest.fixture
def groups(tmp_path: Path) -> Iterator[list[RankGroup]]:
    """Two ranks, each for a thread."""
    made = [RankGroup(rank, 2, tmp_path, None, lambda: None) for rank in (0, 1)]
    yield made
    for each in made:
        each.close()


def together(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """What each call returns or raises, each in a thread."""
    found: list[Any] = [None] * len(calls)

    def run(place: int) -> None:
        try:
            found[place] = calls[place]()
        except Exception as error:
            found[place] = error

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    return found


def encoded(groups: list[RankGroup], failing: tuple[int, ...], times: int = 1) -> list[Any]:
    """What ranks get whose towers add up once, before which some fail."""

    def call(group: RankGroup) -> Callable[[], Any]:
        towers = RankTowers(group, cut=True)

        def encode(items: Sequence[EncodeItem]) -> list[Tensor]:
            if group.rank in failing:
                raise ValueError("a tower fails")
            x = torch.ones(2, 3)
            group.sum_(x)
            return [x]

        def run() -> list[Any]:
            found: list[Any] = []
            for _ in range(times):
                try:
                    found += towers.encode(ITEMS, encode)
                except ValueError as error:
                    found.append(error)
            return found

        return run

    return together([call(group) for group in groups])


def test_towers_that_are_cut_give_every_rank_all_embeddings(groups: list[RankGroup]) -> None:
    for (found,) in encoded(groups, ()):
        assert torch.equal(found, torch.full((2, 3), 2.0))


def test_an_error_of_all_ranks_is_the_item_s(groups: list[RankGroup]) -> None:
    """Twice: each failure is agreed on by itself."""
    for found in encoded(groups, (0, 1), times=2):
        assert [str(error) for error in found] == ["a tower fails"] * 2


@pytest.mark.parametrize("alone", [0, 1])
def test_an_error_of_one_rank_ends_the_engine(
    groups: list[RankGroup], alone: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one waits in a sum, which the executor then ends."""
    monkeypatch.setattr(rank_towers, "_ALIKE_S", 0.1)
    timer = threading.Timer(0.3, groups[1 - alone].abort)
    timer.start()
    found = encoded(groups, (alone,))
    timer.join()
    assert isinstance(found[alone], EngineDeadError)
    assert f"rank {alone} alone (a tower fails)" in str(found[alone])
    assert isinstance(found[1 - alone], RuntimeError | EngineDeadError)
    assert not isinstance(found[1 - alone], StepError)
