"""Items that ranks share out: each item's tower runs on one rank, and all ranks keep what it gives."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from beheld.core.errors import ModelError
from beheld.core.media import ENCODED
from beheld.core.plan import EncodeItem
from beheld.parallel.group import RankGroup
from beheld.parallel.shared_items import SharedItems, owners_of
from beheld.platform.registry import platform_of
from beheld.runner import encoder_cache
from beheld.runner.encoder_cache import EncoderCache
from beheld.runner.runner import ModelRunner


class Tower:
    """Gives embeddings that are an item's number; a broken item fails."""

    device = torch.device("cpu")

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.encoded: list[bytes] = []

    def encode(self, items: Sequence[EncodeItem]) -> list[Tensor]:
        if any(item.features.get("broken") for item in items):
            raise RuntimeError(f"no memory on rank {self.rank}")
        self.encoded += [item.digest for item in items]
        return [
            item.features["value"].mean() * torch.ones(item.num_embeds, item.features.get("width", 3)) for item in items
        ]


@pytest.fixture
def groups(tmp_path: Path) -> Iterator[list[RankGroup]]:
    """Two ranks, each for a thread."""
    made = [RankGroup(rank, 2, tmp_path, None, lambda: None) for rank in (0, 1)]
    yield made
    for each in made:
        each.close()


def item(name: str, count: int, **extra: Any) -> EncodeItem:
    return EncodeItem(name.encode(), "image", {"value": torch.full((100,), float(ord(name)))} | extra, count)


def bare(items: Sequence[EncodeItem], part: int) -> list[EncodeItem]:
    """The items as the executor sends them to a rank: without the features that it does not need."""
    owners = owners_of(items, 2)
    return [
        each if owners.get(each.digest, part) == part else EncodeItem(each.digest, each.modality, {}, each.num_embeds)
        for each in items
    ]


def encoded(groups: list[RankGroup], *steps: Sequence[EncodeItem]) -> tuple[list[Tower], list[EncoderCache], list[Any]]:
    """Towers, stores and lost items of each step, of both ranks."""
    towers = [Tower(group.rank) for group in groups]
    stores = [
        EncoderCache(tower, SharedItems(group, tower.device, torch.float32))  # type: ignore[arg-type]
        for tower, group in zip(towers, groups, strict=True)
    ]
    found: list[Any] = [[], []]

    def run(part: int) -> Callable[[], None]:
        return lambda: found[part].extend(stores[part].encode(bare(items, part)) for items in steps)

    threads = [threading.Thread(target=run(part)) for part in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    return towers, stores, found


def test_items_are_given_out_by_size() -> None:
    items = [item("a", 2), item("b", 9), item("c", 3), item("d", 4)]
    assert owners_of(items, 2) == {b"b": 0, b"d": 1, b"c": 1, b"a": 1}
    assert owners_of(items[:1], 2) == {b"a": 0}
    given = EncodeItem(b"g", "image", {ENCODED: torch.ones(50, 3)}, 50)
    assert owners_of([given, *items], 2) == owners_of(items, 2)


def test_each_item_is_encoded_once_and_kept_by_all(groups: list[RankGroup], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also items of which each takes a call of its own, and one that brings its embeddings."""
    monkeypatch.setattr(encoder_cache, "_CALL_BYTES", 10)
    given = EncodeItem(b"g", "image", {ENCODED: torch.full((2, 3), 7.0)}, 2)
    items = [item("a", 4), item("b", 4), given, item("c", 4), item("d", 4)]
    towers, stores, found = encoded(groups, items, [item("a", 4), item("e", 1)])
    assert [sorted(tower.encoded) for tower in towers] == [[b"a", b"c"], [b"b", b"d", b"e"]]
    assert found == [[(), ()]] * 2
    for store in stores:
        for digest, value in ((b"a", 97.0), (b"b", 98.0), (b"c", 99.0), (b"d", 100.0), (b"e", 101.0), (b"g", 7.0)):
            known = store.known(digest)
            assert known is not None
            assert set(known.flatten().tolist()) == {value}


def test_items_of_one_step_may_be_of_unlike_widths(groups: list[RankGroup]) -> None:
    """Images of Qwen3-Omni bring what goes into later layers, audio does not."""
    items = [item("a", 9, width=6), item("b", 4), item("c", 2, width=6), item("d", 3)]
    _, stores, found = encoded(groups, items)
    assert found == [[()]] * 2
    for store in stores:
        for each in items:
            known = store.known(each.digest)
            assert known is not None
            assert known.shape == (each.num_embeds, each.features.get("width", 3))
            assert set(known.flatten().tolist()) == {float(ord(each.digest))}


def test_a_tower_that_fails_on_one_rank_fails_its_item_on_all_for_the_same_reason(groups: list[RankGroup]) -> None:
    items = [item("a", 4), item("b", 4, broken=True), item("c", 4), item("d", 4)]
    towers, stores, found = encoded(groups, items)
    assert found == [[(b"b",)]] * 2
    assert [set(tower.encoded) for tower in towers] == [{b"a", b"c"}, {b"d"}]
    for store in stores:
        assert store._failures == {b"b": "the image tower failed: no memory on rank 1"}
        assert all(digest in store for digest in (b"a", b"c", b"d"))


@pytest.mark.parametrize("failing", [{0}, {1}, {0, 1}])
def test_a_trial_that_fails_on_one_rank_fails_on_all(groups: list[RankGroup], failing: set[int]) -> None:
    """Else the engine starts, and the items of that rank fail one by one."""
    found: list[Any] = [None, None]

    def run(part: int) -> Callable[[], None]:
        runner: Any = object.__new__(ModelRunner)
        tower = Tower(part)
        runner._pipe, runner._adapter, runner._platform = None, tower, platform_of(tower.device)
        runner._info = SimpleNamespace(architecture="Model")
        runner._shared_items = SharedItems(groups[part], tower.device, torch.float32)
        features: dict[str, Any] = {"value": torch.ones(3), "broken": part in failing}
        tried: Any = SimpleNamespace(digest=b"a", modality="image", features=features, num_kept=2)

        def trial() -> None:
            try:
                runner.try_items([tried])
            except ModelError as error:
                found[part] = str(error)

        return trial

    threads = [threading.Thread(target=run(part)) for part in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    for part, words in enumerate(found):
        named = part if part in failing else 1 - part
        assert f"no memory on rank {named}" in words
        assert words.startswith("On another rank: Model makes nothing of") == (named != part)
