"""Embeddings by digest: merged where a span takes them, a failing tower fails alone."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from beheld.core.errors import StepError
from beheld.core.plan import EncodeItem, SpanView
from beheld.runner.encoder_cache import EncoderCache
from tests.platform import stand_in


class FakeAdapter:
    """A tower whose embedding i of an item is the item's number plus i."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.calls: list[int] = []

    def encode(self, items: Sequence[EncodeItem]) -> list[Tensor]:
        self.calls.append(len(items))
        if any(item.features.get("broken") for item in items):
            raise RuntimeError("no memory")
        return [item.features["value"] + torch.arange(float(item.num_embeds)).unsqueeze(1) for item in items]


def item(digest: bytes, value: float, count: int, **extra: Any) -> EncodeItem:
    return EncodeItem(digest, "image", {"value": value, **extra}, count)


def span(digest: bytes, start: int, mask: tuple[bool, ...] | None, count: int) -> SpanView:
    stop = start + (count if mask is None else len(mask))
    return SpanView("image", digest, start, stop, mask, count, {})


@pytest.mark.parametrize(("start", "stop"), [(0, 12), (2, 7), (4, 5), (5, 9), (8, 12), (3, 6)])
@pytest.mark.parametrize("mask", [None, (True, False, True, True), (False, True, True, False)])
def test_merge_writes_exactly_the_places_of_the_slice(start: int, stop: int, mask: tuple[bool, ...] | None) -> None:
    count = 4 if mask is None else sum(mask)
    store = EncoderCache(FakeAdapter())  # type: ignore[arg-type]
    store.encode([item(b"a", 100.0, count)])
    whole = torch.zeros(12, 1)
    places = [4 + i for i, takes in enumerate(mask or (True,) * 4) if takes]
    whole[places] = (100.0 + torch.arange(count)).unsqueeze(1)
    embeds = torch.zeros(3 + stop - start, 1)
    store.merge(embeds, 3, start, stop, [span(b"a", 4, mask, count)])
    assert torch.equal(embeds[3:], whole[start:stop])
    assert (embeds[:3] == 0).all()


def test_an_item_whose_tower_fails_takes_no_other_with_it() -> None:
    store = EncoderCache(FakeAdapter())  # type: ignore[arg-type]
    lost = store.encode([item(b"a", 1.0, 2), item(b"b", 2.0, 2, broken=True), item(b"c", 3.0, 2)])
    assert lost == (b"b",)
    assert b"a" in store
    assert b"c" in store
    with pytest.raises(StepError, match="no memory"):
        store.merge(torch.zeros(4, 1), 0, 0, 4, [span(b"b", 1, None, 2)])


class Rounding(FakeAdapter):
    """A tower that multiplies the items of a call together: one row is rounded otherwise than several."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.randn(768, 768, generator=torch.Generator().manual_seed(0))

    def encode(self, items: Sequence[EncodeItem]) -> list[Tensor]:
        super().encode(items)
        rows = torch.stack([item.features["row"] for item in items])
        return list((rows @ self.weight).unsqueeze(1))


def rounded(digest: bytes, **extra: Any) -> EncodeItem:
    row = torch.randn(768, generator=torch.Generator().manual_seed(digest[0]))
    return item(digest, 0.0, 1, row=row, **extra)


@pytest.mark.parametrize("place", range(6))
@pytest.mark.parametrize("most", [2, 3, 4096])
def test_120_mates_of_failing_items_keep_their_bits(place: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are encoded in the calls that they have without these items."""
    monkeypatch.setattr("beheld.runner.encoder_cache._CALL_EMBEDS", most)
    sound = [rounded(bytes([n])) for n in range(5)]
    undisturbed, disturbed = EncoderCache(Rounding()), EncoderCache(Rounding())  # type: ignore[arg-type]
    assert undisturbed.encode(sound) == ()
    broken = [rounded(b"x", broken=True), rounded(b"y", broken=True)]
    assert set(disturbed.encode([*sound[:place], broken[0], *sound[place:], broken[1]])) == {b"x", b"y"}
    for one in sound:
        kept, wanted = disturbed.known(one.digest), undisturbed.known(one.digest)
        assert kept is not None
        assert wanted is not None
        assert torch.equal(kept, wanted)


def test_items_that_are_too_much_for_one_call_are_encoded_alone() -> None:
    class Tight(FakeAdapter):
        def encode(self, items: Sequence[EncodeItem]) -> list[Tensor]:
            found = super().encode(items)
            if len(items) > 1:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return found

    adapter = Tight()
    store = EncoderCache(adapter)  # type: ignore[arg-type]
    assert store.encode([item(bytes([n]), float(n), 2) for n in range(3)]) == ()
    assert adapter.calls == [3, 1, 1, 1]


def test_places_that_take_no_embedding_need_none() -> None:
    store = EncoderCache(FakeAdapter())  # type: ignore[arg-type]
    masked = span(b"a", 0, (True, True, False), 2)
    store.merge(torch.zeros(1, 1), 0, 2, 3, [masked])
    with pytest.raises(StepError, match="missing"):
        store.merge(torch.zeros(2, 1), 0, 1, 3, [masked])


def test_what_is_there_is_not_encoded_again_until_it_is_forgotten() -> None:
    adapter = FakeAdapter()
    store = EncoderCache(adapter)  # type: ignore[arg-type]
    store.encode([item(b"a", 1.0, 2)])
    store.encode([item(b"a", 1.0, 2)])
    assert adapter.calls == [1]
    store.forget([b"a"])
    store.encode([item(b"a", 1.0, 2)])
    assert adapter.calls == [1, 1]


@pytest.mark.case(32)
def test_a_wrong_number_of_embeddings_is_a_loss() -> None:
    class Short(FakeAdapter):
        def encode(self, items: Sequence[EncodeItem]) -> list[Tensor]:
            return [torch.zeros(1, 1) for _ in items]

    store = EncoderCache(Short())  # type: ignore[arg-type]
    assert store.encode([item(b"a", 1.0, 2)]) == (b"a",)


def test_on_a_cpu_large_pictures_do_not_share_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("beheld.runner.encoder_cache._CALL_BYTES", 100)
    adapter = FakeAdapter()
    sizes = (10, 10, 10, 40, 1, 1)
    items = [item(bytes([i]), 0.0, 1, pixels=torch.zeros(n)) for i, n in enumerate(sizes)]
    assert EncoderCache(adapter).encode(items) == ()  # type: ignore[arg-type]
    # 4 bytes each: two of the first fit, the fourth does not fit at all and goes alone.
    assert adapter.calls == [2, 1, 1, 2]
    stand_in.register(monkeypatch)
    adapter = FakeAdapter()
    adapter.device = torch.device("meta")
    store = EncoderCache(adapter)  # type: ignore[arg-type]
    store.encode(items)
    assert adapter.calls == [6]


@pytest.mark.parametrize("knot", [False, True], ids=["plain", "a variable holds the error"])
def test_what_a_failed_call_took_is_free_when_its_items_are_tried_alone(knot: bool) -> None:
    """Otherwise the neighbours of an item that is too large would lack its memory too."""
    taken: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    class Tight(FakeAdapter):
        def encode(self, items: Sequence[EncodeItem]) -> list[Tensor]:
            alive.append(sum(ref() is not None for ref in taken))
            if len(items) == 1 and not items[0].features.get("broken"):
                return super().encode(items)
            activations = torch.zeros(64)
            taken.append(weakref.ref(activations))
            if not knot:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            error = torch.OutOfMemoryError("CUDA out of memory.")
            raise error

    store = EncoderCache(Tight())  # type: ignore[arg-type]
    gc.disable()
    try:
        lost = store.encode([item(b"a", 1.0, 2), item(b"b", 2.0, 2, broken=True), item(b"c", 3.0, 2)])
    finally:
        gc.enable()
    assert lost == (b"b",)
    # All, each alone, and the sound ones together, which do not fit here.
    assert alive == [0] * 5


def test_reasons_of_failures_are_bounded() -> None:
    """The scheduler does not tell to forget what it has lost."""
    store = EncoderCache(FakeAdapter())  # type: ignore[arg-type]
    for n in range(3000):
        assert store.encode([item(n.to_bytes(2), 1.0, 2, broken=True)])
    assert len(store._failures) < 3000
    with pytest.raises(StepError, match="no memory"):
        store.merge(torch.zeros(2, 1), 0, 0, 2, [span((2999).to_bytes(2), 0, None, 2)])
