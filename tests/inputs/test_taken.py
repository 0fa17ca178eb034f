"""Pixels are taken out of Pillow's pictures as they are, whatever lies between them, and by whichever way."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import PIL
import pytest
from PIL import Image

from beheld.core.config import MediaLimits
from beheld.core.errors import LimitError
from beheld.inputs.media import open_media, pixels
from beheld.inputs.media.pixels import Pixels
from tests import tiny
from tests.inputs import pipes

SIZES = ((1, 1), (3, 1), (1, 5), (84, 56), (1023, 7))


def noise(width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8))


def made_otherwise(picture: Image.Image) -> list[Image.Image]:
    """The same picture, made in ways that leave other bytes between its pixels."""
    return [
        Image.merge("RGB", picture.split()),
        Image.frombytes("RGB", picture.size, picture.tobytes()),
        picture.convert("RGBA").convert("RGB"),
        picture.crop((0, 0, *picture.size)),
    ]


@pytest.fixture(params=["lent", "in strips", "repacked"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each way of taking pixels out."""
    whole = pixels._copied
    if request.param == "in strips":
        # Small pictures lie in one block each, and large ones take long.
        monkeypatch.setattr(pixels, "_STRIP_BYTES", 2000)
        monkeypatch.setattr(pixels, "_copied", lambda p: None if 4 * p.width * p.height > 4092 else whole(p))
    elif request.param == "repacked":
        monkeypatch.setattr(pixels, "_copied", lambda picture: None)
    return request.param


@pytest.mark.parametrize("size", SIZES)
def test_what_is_taken_is_the_picture(size: tuple[int, int], way: str) -> None:
    picture = noise(*size)
    taken = Pixels.of(picture)
    assert (taken.width, taken.height, taken.nbytes) == (*size, 4 * size[0] * size[1])
    rows = taken.rgbx.reshape(size[1], size[0], 4)
    assert np.array_equal(rows[:, :, :3], np.asarray(picture))
    assert (rows[:, :, 3] == 255).all()
    back = taken.image()
    assert (back.mode, back.size, back.tobytes()) == ("RGB", picture.size, picture.tobytes())


@pytest.mark.parametrize("size", SIZES)
def test_what_lies_between_pixels_changes_nothing(size: tuple[int, int], way: str) -> None:
    picture = noise(*size)
    digests = {Pixels.of(one).digest() for one in (picture, *made_otherwise(picture))}
    assert len(digests) == 1
    assert Pixels.of(noise(*size[::-1])).digest() not in digests or size[0] == size[1]


def test_pillow_leaves_different_bytes_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the test before this one could not fail."""
    monkeypatch.setattr(pixels, "_opaque", bytes)
    picture = noise(84, 56)
    between = {pixels._copied(one)[3::4] for one in (picture, *made_otherwise(picture))}
    assert len(between) > 1


def test_a_picture_in_several_blocks() -> None:
    picture = noise(2300, 2000)
    assert pixels._copied(picture) is None
    assert Pixels.of(picture).image().tobytes() == picture.tobytes()


def test_pillow_s_bound_on_what_it_opens_says_nothing_of_what_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    large = noise(2300, 2000)
    whole = Pixels.of(large).digest()
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 900_000)
    assert Pixels.of(large).digest() == whole


def test_it_is_a_copy() -> None:
    picture = noise(84, 56)
    found = open_media.plain_rgb(picture)
    taken = open_media.taken(found)
    before = picture.tobytes()
    picture.paste((1, 2, 3), (0, 0, 84, 56))
    assert taken.payload.image().tobytes() == before
    assert taken.payload.digest() == taken.digest == found.digest != open_media.plain_rgb(picture).digest


@pytest.mark.parametrize("size", SIZES)
def test_a_digest_needs_no_copy(size: tuple[int, int]) -> None:
    picture = noise(*size)
    wanted = Pixels.of(picture).digest()
    assert pixels.digest_of(picture) == wanted
    others = {pixels.digest_of(one) for one in made_otherwise(picture)}
    assert len(others - {wanted}) == 1, "some have other bytes between their pixels"


def test_who_lends_nothing_has_its_digest_from_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    large, small = noise(2300, 2000), noise(84, 56)
    assert pixels.digest_of(large) is None, "it lies in several blocks"
    monkeypatch.setattr(pixels, "_lends", lambda: False)
    assert pixels.digest_of(small) is None
    for picture in (large, small):
        found = open_media.plain_rgb(picture)
        assert not found.borrowed
        assert found.payload.image().tobytes() == picture.tobytes()


@pytest.mark.parametrize("size", [(10, 10), (112, 56), (57, 56)])
def test_memory_of_another_size_is_not_read(size: tuple[int, int]) -> None:
    """As of a Pillow that lends rows in another form: what it says it lent decides, not what was expected."""
    lender = SimpleNamespace(width=size[0], height=size[1], __arrow_c_array__=noise(56, 56).__arrow_c_array__)
    assert pixels.digest_of(lender) is None


@pytest.mark.parametrize("salt", [{}, {"cache_salt": "mine"}], ids=["shared", "salted"])
def test_a_known_picture_is_not_copied(salt: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = pipes.make("llava")
    first = pipes.ask(pipe, "llava", [noise(56, 56)], **salt)
    monkeypatch.setattr(open_media, "_copied", None)
    again = pipes.ask(pipe, "llava", [noise(56, 56)], **salt)
    assert [one.receipts[0].cached for one in (first, again)] == [False, True]
    assert again.spans[0].item.digest == first.spans[0].item.digest
    with pytest.raises(TypeError):
        pipes.ask(pipe, "llava", [noise(56, 57)], **salt)


def test_a_known_picture_is_known_whatever_lies_between_its_pixels() -> None:
    pipe = pipes.make("llava")
    asked = [pipes.ask(pipe, "llava", [one]) for one in (noise(56, 56), *made_otherwise(noise(56, 56)))]
    assert [one.receipts[0].cached for one in asked] == [False, *[True] * (len(asked) - 1)]
    assert len({one.spans[0].item.digest for one in asked}) == 1


def test_a_picture_that_changes_while_it_is_prepared_becomes_nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, copied = pipes.make("llava"), open_media._copied

    def late(picture: Image.Image) -> open_media.Source:
        picture.paste((1, 2, 3), (0, 0, 56, 56))
        return copied(picture)

    with monkeypatch.context() as patched:
        patched.setattr(open_media, "_copied", late)
        changed = pipes.ask(pipe, "llava", [noise(56, 56)])
    assert (
        changed.spans[0].item.digest
        == pipes.ask(pipe, "llava", [Image.new("RGB", (56, 56), (1, 2, 3))]).spans[0].item.digest
    )
    plain = pipes.ask(pipe, "llava", [noise(56, 56)])
    assert not plain.receipts[0].cached
    assert plain.spans[0].item.digest != changed.spans[0].item.digest


def test_what_is_held_outlives_the_picture() -> None:
    taken = [Pixels.of(noise(300 + i, 300)) for i in range(20)]
    assert all(one.image().tobytes() == noise(300 + i, 300).tobytes() for i, one in enumerate(taken))


def test_every_source_of_a_picture_has_one_digest() -> None:
    picture = tiny.picture(84, 56, 1)
    limits = MediaLimits()
    sources = [open_media.Source("array", b"", np.asarray(picture)), open_media.Source("PIL", b"", picture)]
    contents = [open_media.open_source("image", source, limits, lambda: 0)[1] for source in sources]
    assert {content.digest for content in contents} == {open_media.plain_rgb(picture).digest}


def test_rows_with_something_between_them_are_not_taken_for_whole_ones() -> None:
    """Pillow 11.3 to 12.3 lends them as if there were nothing; PILLOW_ALIGNMENT asks for it."""
    wanted = noise(7, 5)
    core: Any = vars(Image)["core"]
    core.set_alignment(64)
    try:
        picture = wanted.rotate(180).rotate(180)
        taken, key = Pixels.of(picture), pixels.digest_of(picture)
    finally:
        core.set_alignment(1)
    assert taken.image().tobytes() == wanted.tobytes()
    assert key in (None, Pixels.of(wanted).digest())


def test_a_picture_that_grows_as_it_is_loaded_is_refused() -> None:
    class Growing(Image.Image):
        def load(self) -> Any:
            if self.size == (56, 56):
                grown = noise(2000, 2000)
                self._im, self._size = grown.im, grown.size
            return super().load()

    picture = Growing()
    small = noise(56, 56)
    picture._im, picture._size, picture._mode = small.im, small.size, "RGB"
    pipe = pipes.make("llava", media_limits={"max_pixels": 1_000_000})
    with pytest.raises(LimitError, match="2000 x 2000"):
        pipes.ask(pipe, "llava", [picture])


def test_nothing_is_kept_of_pictures_that_are_gone(way: str) -> None:
    """As Pillow 11.2 kept what it had lent."""

    def held() -> int:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")

    size = (1000, 1000) if way == "lent" else (200, 200)
    for _ in range(10):
        Pixels.of(Image.new("RGB", size))
    before = held()
    for _ in range(200 if way == "lent" else 5000):
        Pixels.of(Image.new("RGB", size))
    assert held() - before < 150 << 20, "they took 800 MB in all"


@pytest.mark.parametrize(("version", "lends"), [("11.0.0", False), ("11.2.1", False), ("11.3.0", True), ("13.0", True)])
def test_which_pillow_lends(monkeypatch: pytest.MonkeyPatch, version: str, lends: bool) -> None:
    monkeypatch.setattr(PIL, "__version__", version)
    assert pixels._lends.__wrapped__() is lends
