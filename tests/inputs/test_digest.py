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

from beheld.inputs.media import digest
from beheld.inputs.media.digest import Digest
from tests import tiny
from tests.inputs import pipes
from tests.long import sized

PICTURE = tiny.picture(84, 56, 1)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=4)
    | st.binary(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


def exact(value: Any) -> Any:
    """A value that is equal only to one of the same types and nesting."""
    if isinstance(value, dict):
        return ("dict", frozenset((k, exact(v)) for k, v in value.items()))
    if isinstance(value, list | tuple):
        return ("list", tuple(exact(v) for v in value))
    return (type(value).__name__, repr(value))


@settings(max_examples=sized(400, 50_000), deadline=None)
@given(VALUES, VALUES)
@pytest.mark.case(56)
def test_equal_if_and_only_if_equal(left: Any, right: Any) -> None:
    same = Digest("x").add(left).done() == Digest("x").add(right).done()
    assert same == (exact(left) == exact(right))


@settings(max_examples=sized(200, 10_000), deadline=None)
@given(st.lists(st.text(max_size=3), max_size=4), st.lists(st.text(max_size=3), max_size=4))
@pytest.mark.case(56)
def test_no_concatenation_collides(left: list[str], right: list[str]) -> None:
    one, two = Digest("x"), Digest("x")
    for text in left:
        one.add(text)
    for text in right:
        two.add(text)
    assert (one.done() == two.done()) == (left == right)


SIZES = [(1, 4), (4, 1), (2, 2), (2, 4)]
MODES = {"1": 1, "L": 1, "P": 1, "LA": 2, "RGB": 3, "RGBA": 4, "CMYK": 4, "YCbCr": 3, "I;16": 2, "I": 4, "F": 4}
PALETTES = [b"\0\0\0" * 2, b"\0\0\1" * 2, b"\0\0\0\0\0\1"]


def raw(mode: str, size: tuple[int, int], place: int) -> bytes:
    """Zeros, but for the first bit of one place; all of them for a place that there is not."""
    data = bytearray(size[1] * ((size[0] + 7) // 8) if mode == "1" else size[0] * size[1] * MODES[mode])
    # Of bilevel pictures the other bits of a byte may be filling.
    if mode != "1" or place == 0:
        data[place : place + 1] = bytes([128])[: len(data) - place]
    return bytes(data)


@st.composite
def pairs(draw: st.DrawFn, *parts: st.SearchStrategy[Any]) -> tuple[list[Any], list[Any]]:
    """Two draws of all parts that differ in some of them, most often in one or in none."""
    left = [draw(part) for part in parts]
    right = list(left)
    for _ in range(draw(st.sampled_from([0, 1, 1, 1, 2, 9]))):
        place = draw(st.integers(0, len(parts) - 1))
        right[place] = draw(parts[place])
    return left, right


PICTURES = pairs(
    st.sampled_from(sorted(MODES) + ["P"] * 9),
    st.sampled_from(SIZES),
    st.integers(0, 40),
    st.sampled_from(PALETTES),
    st.sampled_from([None, 0, b"\0\1"]),
    st.sampled_from([1, 3, 6]),
)


def drawn(form: list[Any]) -> tuple[Image.Image, Any]:
    """A picture, and all that it means."""
    mode, size, place, palette, clear, turned = form
    data = raw(mode, size, place)
    image = Image.frombytes(mode, size, data)
    if mode != "P":
        palette = clear = None
    if palette is not None:
        image.putpalette(palette)
    if clear is not None:
        image.info["transparency"] = clear
    image.getexif()[0x0112] = turned
    return image, (mode, size, data, palette, clear, turned)


@settings(max_examples=sized(400, 20_000), deadline=None)
@given(PICTURES)
@pytest.mark.case(56)
def test_pictures_are_equal_if_and_only_if_all_of_them_is(forms: tuple[list[Any], list[Any]]) -> None:
    (one, left), (two, right) = map(drawn, forms)
    assert (digest.of_image(one) == digest.of_image(two)) == (left == right)


OPTION = st.dictionaries(st.sampled_from("ab"), st.sampled_from([1, 1.0, True, "1", None, [1], [[1]], [1, 1]]))
ITEMS = pairs(
    st.sampled_from(["<i2", "<u2", "<f2", ">i2", "<i4"]),
    st.sampled_from([(4,), (2, 2), (1, 4), (4, 1)]),
    st.sampled_from([bytes(16), b"\0\1" + bytes(14)]),
    st.sampled_from("CF"),
    st.sampled_from(["image", "video"]),
    st.sampled_from(["", "alone"]),
    OPTION | st.builds(lambda inner: {"a": inner}, OPTION),
)


@settings(max_examples=sized(400, 20_000), deadline=None)
@given(ITEMS)
@pytest.mark.case(56)
def test_items_are_equal_if_and_only_if_all_that_decides_them_is(forms: tuple[list[Any], list[Any]]) -> None:
    """Type, shape and values of arrays (whatever their order in memory), options (whatever theirs) and their nesting,
    what they are and where."""

    def made(form: list[Any]) -> tuple[bytes, Any]:
        dtype, shape, data, order, modality, setting, options = form
        array = np.frombuffer(data, dtype)[:4].reshape(shape).astype(dtype, order=order)
        found = {
            digest.of_item(digest.of_array("x", array), modality, b"p", said, setting)
            for said in (options, dict(reversed(options.items())))
        }
        assert len(found) == 1
        return found.pop(), (array.dtype.str, shape, array.tobytes(), modality, setting, exact(options))

    (one, left), (two, right) = map(made, forms)
    assert (one == two) == (left == right)


@pytest.mark.case(56)
def test_a_set_is_no_list() -> None:
    found = [Digest("x").add(value).done() for value in ({1, 2}, ["set", 1, 2], [1, 2], [["set", 1, 2]], {"set", 1})]
    assert len(set(found)) == len(found)
    assert Digest("x").add(frozenset((2, 1))).done() == found[0]


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
    found = {digest.of_image(image) for image in (grey, palette, other, clear, flat, wide, PICTURE)}
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
    assert pipe.cache.stats().items == 1
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
    assert pipe.cache.stats().items == 0


def test_the_cache_is_bounded_by_bytes() -> None:
    family = "llava"
    pipe = pipes.make(family, {"processor_cache_bytes": 200_000})
    for seed in range(20):
        pipes.ask(pipe, family, [tiny.picture(56, 56, seed)])
    stats = pipe.cache.stats()
    assert 0 < stats.num_bytes <= 200_000
    assert stats.evictions > 0
    pipe.cache.clear()
    assert pipe.cache.stats().items == 0


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
