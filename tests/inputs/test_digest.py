"""Digests: equal exactly where the meaning is equal; a seen picture is found again quickly, a changed one never."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from beheld.inputs import digest
from beheld.inputs.digest import Digest
from tests import tiny
from tests.inputs import pipes

PICTURE = tiny.picture(84, 56, 1)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=4)
    | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


def exact(value: Any) -> Any:
    """A value that is equal only to one of the same types and nesting."""
    if isinstance(value, dict):
        return ("dict", frozenset((k, exact(v)) for k, v in value.items()))
    if isinstance(value, list | tuple):
        return ("list", tuple(exact(v) for v in value))
    return (type(value).__name__, repr(value))


@settings(max_examples=400, deadline=None)
@given(VALUES, VALUES)
@pytest.mark.case(56)
def test_equal_if_and_only_if_equal(left: Any, right: Any) -> None:
    same = Digest("x").add(left).done() == Digest("x").add(right).done()
    assert same == (exact(left) == exact(right))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text(max_size=3), max_size=4), st.lists(st.text(max_size=3), max_size=4))
@pytest.mark.case(56)
def test_no_concatenation_collides(left: list[str], right: list[str]) -> None:
    one, two = Digest("x"), Digest("x")
    for text in left:
        one.add(text)
    for text in right:
        two.add(text)
    assert (one.done() == two.done()) == (left == right)


def test_what_has_no_bytes_has_no_digest() -> None:
    with pytest.raises(TypeError, match="no digest"):
        Digest("x").add(object())


def test_everything_that_decides_a_picture_is_in_its_digest() -> None:
    grey = PICTURE.convert("L")
    palette = PICTURE.quantize(8)
    other = palette.copy()
    colours = other.getpalette()
    assert colours is not None
    colours[0] ^= 1
    other.putpalette(colours)
    clear = palette.copy()
    clear.info["transparency"] = 2
    flat = Image.frombytes("L", (56, 84), grey.tobytes())
    wide = Image.frombytes("LA", (42, 56), grey.tobytes())
    found = {digest.of_picture(image) for image in (grey, palette, other, clear, flat, wide, PICTURE)}
    assert len(found) == 7


def test_arrays_differ_by_type_and_shape() -> None:
    array = np.arange(24, dtype=np.uint8)
    forms = [array, array.reshape(2, 12), array.reshape(12, 2), array.view(np.int8), array.view(np.uint16)]
    assert len({digest.of_array("x", form) for form in forms} | {digest.of_array("y", array)}) == 6
    assert digest.of_array("x", array.reshape(4, 6).T) == digest.of_array("x", array.reshape(4, 6).T.copy())
    assert digest.of_array("x", array[:0])


@pytest.mark.case(56)
def test_any_way_in_gives_the_same_item_and_any_change_another(tmp_path: Path) -> None:
    family = "qwen2_vl"
    pipe = pipes.make(family)
    path = tmp_path / "p.png"
    path.write_bytes(pipes.encoded(PICTURE))
    forms: list[Any] = [PICTURE, path, path.read_bytes(), pipes.encoded(PICTURE, "BMP"), np.asarray(PICTURE)]
    forms += [Image.open(path), PICTURE.copy(), PICTURE.convert("RGBA")]
    items = [pipes.ask(pipe, family, [form]).spans[0].item for form in forms]
    assert len({item.digest for item in items}) == 1
    assert all(item is items[0] for item in items), "made once"
    assert pipe.cache_stats().items == 1
    changed = PICTURE.copy()
    first = pipes.ask(pipe, family, [changed])
    assert first.receipts[0].cached
    changed.putpixel((3, 3), (1, 2, 3))
    second = pipes.ask(pipe, family, [changed])
    assert not second.receipts[0].cached
    assert second.spans[0].item.digest != items[0].digest


def test_options_and_setting_are_in_the_digest() -> None:
    family = "qwen2_vl"
    pipe = pipes.make(family)
    plain = pipes.ask(pipe, family, [PICTURE]).spans[0].item
    other = pipes.ask(pipe, family, [PICTURE], mm_processor_kwargs={"max_pixels": 3136}).spans[0].item
    again = pipes.ask(pipe, family, [PICTURE], mm_processor_kwargs={"max_pixels": 3136}).spans[0].item
    assert plain.digest != other.digest
    assert other is again
    assert len(plain.digest) == 32


def test_without_a_cache_nothing_is_kept() -> None:
    family = "llava"
    pipe = pipes.make(family, {"processor_cache_bytes": 0})
    first, second = (pipes.ask(pipe, family, [PICTURE]) for _ in range(2))
    assert not second.receipts[0].cached
    assert first.spans[0].item.digest == second.spans[0].item.digest
    assert pipe.cache_stats().items == 0


def test_the_cache_is_bounded_by_bytes() -> None:
    family = "llava"
    pipe = pipes.make(family, {"processor_cache_bytes": 200_000})
    for seed in range(20):
        pipes.ask(pipe, family, [tiny.picture(56, 56, seed)])
    stats = pipe.cache_stats()
    assert 0 < stats.num_bytes <= 200_000
    assert stats.evictions > 0
    pipe.clear_cache()
    assert pipe.cache_stats().items == 0


def test_a_seen_picture_costs_less_than_a_millisecond() -> None:
    family = "qwen2_vl"
    pipe = pipes.make(family)
    big, bytes_of_big = tiny.picture(448, 448, 1), pipes.encoded(tiny.picture(1024, 768, 2), "JPEG")
    for source in (big, bytes_of_big):
        pipes.ask(pipe, family, [source])
        spent = []
        for _ in range(30):
            begin = time.perf_counter()
            receipt = pipes.ask(pipe, family, [source]).receipts[0]
            spent.append(time.perf_counter() - begin)
            assert receipt.cached
        # The best of many: a busy machine says nothing of the work itself. The prompt's own tokens are included.
        assert min(spent) < 1e-3, f"{1e3 * min(spent):.2f} ms"
