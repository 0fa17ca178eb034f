"""Bounds on media: found before the work that they bound, set by the operator, and kept by liars (cases by number)."""

from __future__ import annotations

import contextlib
import io
import struct
import subprocess
import threading
import time
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from PIL import Image

from beheld.api import start
from beheld.core.config import EngineArgs, MediaLimits
from beheld.core.errors import ConfigError, DecodeError, LimitError
from beheld.inputs.media import audio, decode, header, item_maker, tasks, video
from beheld.inputs.media.memory_gate import MemoryGate
from beheld.inputs.media.open_media import Source
from beheld.inputs.media.video import FrameSampling
from beheld.platform import host
from beheld.utils import allocator
from beheld.utils.cancellation import Cancelled, CancelToken
from tests import tiny
from tests.inputs import pipes

LIMITS = MediaLimits()
FAMILY = "qwen2_5_vl"


def flat_png(width: int, height: int) -> bytes:
    """A PNG of one bit per pixel, all alike."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    rows = zlib.compress(bytes((1 + (width + 7) // 8) * height), 9)
    size = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


# ---------------------------------------------------------------------- pictures


@pytest.mark.parametrize(
    ("file_format", "mode", "options"),
    [
        ("PNG", "RGB", {}),
        ("PNG", "P", {}),
        ("GIF", "P", {}),
        ("BMP", "RGB", {}),
        ("JPEG", "RGB", {}),
        ("JPEG", "L", {"progressive": True}),
        ("JPEG", "CMYK", {"comment": b"\xff\xc0" * 40}),
        ("JPEG", "RGB", {"exif": b"Exif\0\0" + b"\xff\xc2\0\x11\x08\0\1\0\1" * 9}),
        ("WEBP", "RGB", {}),
        ("WEBP", "RGBA", {}),
        ("WEBP", "RGB", {"lossless": True}),
        ("WEBP", "RGB", {"exif": b"Exif\0\0II*\0\x08\0\0\0\0\0"}),
    ],
)
def test_sizes_in_headers_are_those_that_are_decoded(file_format: str, mode: str, options: dict[str, Any]) -> None:
    data = pipes.encoded(tiny.picture(301, 77, 1).convert(mode), file_format, **options)
    assert header.size_of(data) == (301, 77)
    for stop in range(0, 40, 3):
        assert header.size_of(data[:stop]) in (None, (301, 77))


def test_sizes_of_other_headers() -> None:
    os2 = b"BM" + bytes(12) + struct.pack("<IHHHH", 12, 31, 41, 1, 24)
    upside_down = b"BM" + bytes(12) + struct.pack("<Iii", 40, 31, -41)
    assert header.size_of(os2) == header.size_of(upside_down) == (31, 41)
    filled = b"\xff\xd8\xff\xff\xff\x01\xff\xd0\xff\xc0\0\x11\x08" + struct.pack(">HH", 41, 31)
    assert header.size_of(filled) == (31, 41)
    begin = time.thread_time()
    for endless in (
        b"\xff\xd8" + b"\xff\xe0\0\2" * (1 << 20),
        b"\xff\xd8" + b"\xff" * (4 << 20),
        b"\xff\xd8" + bytes(9),
    ):
        assert header.size_of(endless) is None
    assert time.thread_time() - begin < 1.0
    for nothing in (b"", b"x", b"RIFF\0\0\0\0WEBPVP8?" + bytes(20), b"\xff\xd8\xff\xda\0\2"):
        assert header.size_of(nothing) is None


@pytest.mark.case(21)
def test_bombs_are_refused_from_their_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The case's own file among them; nothing of it reaches a decoder."""
    bombs = [flat_png(13300, 13300), flat_png(11000, 11000), flat_png(5000, 5000)]
    assert len(bombs[0]) < 25_000
    pipe = pipes.make(FAMILY)
    pipes.ask(pipe, FAMILY, pipes.encoded(tiny.picture(56, 56, 1)))
    monkeypatch.setattr(Image, "open", lambda *_, **__: pytest.fail("a bomb was opened"))
    begin = time.process_time()
    for bomb, reason in zip(bombs, ("the limit is", "pixels in only", "pixels in only"), strict=True):
        with pytest.raises(LimitError, match=reason) as caught:
            pipes.ask(pipe, FAMILY, bomb)
        assert caught.value.item == "image 1"
    assert time.process_time() - begin < 1.0


@pytest.mark.case(21)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_the_decoder_asks_again() -> None:
    for bomb in (flat_png(13300, 13300), flat_png(5000, 5000)):
        with pytest.raises(LimitError):
            decode.open_bytes(bomb, LIMITS)


def test_real_pictures_are_not_bombs() -> None:
    """A blank page of 15 megapixels, the emptiest JPEG there can be of 25, and a photograph's size of 102."""
    decode.check_header(flat_png(5000, 3000), LIMITS)
    blank = pipes.encoded(Image.new("L", (5000, 5000), 255), "JPEG", quality=1)
    decode.check_header(blank, LIMITS)
    decode.check_size(11648, 8736, LIMITS, 9_000_000)


def test_the_operator_sets_limits() -> None:
    pipe = pipes.make(FAMILY, media_limits={"max_pixels": 5000, "work_timeout_s": {"image": 7}})
    assert pipe.reader._limits.work_timeout_s == {**LIMITS.work_timeout_s, "image": 7}
    assert pipes.ask(pipe, FAMILY, pipes.encoded(tiny.picture(56, 56, 1))).spans
    for large in (tiny.picture(84, 84, 1), pipes.encoded(tiny.picture(84, 84, 1)), np.zeros((84, 84, 3), np.uint8)):
        with pytest.raises(LimitError, match="the limit is 5000"):
            pipes.ask(pipe, FAMILY, large)
    for wrong, reason in (
        ({"max_pixel": 5}, "Did you mean 'max_pixels'"),
        ({"max_pixels": 0}, "above 0"),
        ({"max_pixels": 1.5}, "whole number"),
        ({"max_audio_s": float("inf")}, "above 0"),
        ({"max_frames": True}, "above 0"),
        ({"work_timeout_s": {"picture": 5}}, "no modality 'picture'"),
        ({"work_timeout_s": {"image": -1}}, "above 0"),
        ({"work_timeout_s": 5}, "mapping"),
    ):
        with pytest.raises(ConfigError, match=reason):
            MediaLimits.of(wrong)


@pytest.mark.case(110)
def test_limits_follow_the_memory_that_a_container_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A permitted PNG of 128 megapixels took 2.4 GiB and had the server killed in a container of 2 GiB."""
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory.max").write_text(str(2 << 30))
    (tmp_path / "memory.current").write_text(str(1 << 30))
    (tmp_path / "memory.stat").write_text("inactive_file 0\n")
    group = host.group_memory(tmp_path)
    monkeypatch.setattr(host, "group_memory", lambda: group)
    args = EngineArgs(model="a", media_limits={"max_frames": 9})
    start.fit_media(args, taken_bytes=24 << 20)
    limits, left = MediaLimits.of(args.media_limits), (1 << 30) - (24 << 20)
    assert limits.max_frames == 9
    assert 12_000_000 < limits.max_pixels <= left // 80
    assert limits.max_work_bytes <= left // 2
    with pytest.raises(LimitError, match="the limit is"):
        decode.check_header(flat_png(14_000, 9000) + bytes(600_000), limits)
    own = EngineArgs(model="a", media_limits={"max_pixels": 128_000_000})
    start.fit_media(own)
    assert MediaLimits.of(own.media_limits).max_pixels == 128_000_000, "the operator's word stands"
    monkeypatch.setattr(host, "group_memory", lambda: None)
    free = EngineArgs(model="a")
    start.fit_media(free)
    assert free.media_limits is None


@pytest.mark.case(110)
@pytest.mark.parametrize(("device", "engines", "taken"), [("cpu", 1, 5 << 20), ("cpu", 3, 15 << 20), ("cuda", 2, 0)])
def test_limits_leave_room_for_what_engines_hold_in_the_hosts_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, engines: int, taken: int
) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(1 << 20))
    found: list[int] = []
    monkeypatch.setattr(start, "fit_media", lambda args, taken_bytes, num_fronts: found.append(taken_bytes))
    args = EngineArgs(model="a", data_parallel_size=engines)
    config: Any = SimpleNamespace(device=device, kv_cache_bytes=4 << 20)
    start._settled(Mock(), args, Mock(path=str(tmp_path)), config)
    assert found == [taken]


@pytest.mark.case(110)
def test_memory_of_a_large_image_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server keeps freed memory for its steps: of eight images of 128 megapixels it kept 3.2 GiB."""
    pipe, returned = pipes.make("llava"), list[int]()
    monkeypatch.setattr(item_maker, "_MOST_KEPT_BYTES", 4 * 1000 * 1000)
    monkeypatch.setattr(allocator, "give_back_freed", lambda: returned.append(1))
    pipes.ask(pipe, "llava", flat_png(1000, 1000))
    assert not returned, "small ones are not held up by it"
    pipes.ask(pipe, "llava", flat_png(1100, 1000))
    assert returned == [1]
    with pytest.raises(DecodeError):
        pipes.ask(pipe, "llava", flat_png(1200, 1000)[:60])
    assert returned == [1, 1], "after a failure, too"


@pytest.mark.case(21)
def test_opened_media_have_room_for_each_in_turn() -> None:
    gate, order = MemoryGate(10), []
    inside = threading.Event()

    def enter(name: str, num_bytes: int) -> None:
        with gate.within(num_bytes, CancelToken()):
            order.append(name)

    with gate.within(6, CancelToken()):
        threads = [threading.Thread(target=enter, args=given) for given in (("huge", 99), ("small", 1))]
        for thread in threads:
            thread.start()
            time.sleep(0.05)
        assert order == [], "who came later does not overtake, although there is room"
        inside.set()
    for thread in threads:
        thread.join(5)
    assert order == ["huge", "small"]


@pytest.mark.case(109)
def test_at_the_gate_one_client_leaves_room_for_others() -> None:
    gate, order, end = MemoryGate(100), list[str](), threading.Event()

    def enter(name: str, num_bytes: int) -> None:
        with gate.within(num_bytes, CancelToken(), name[0]):
            order.append(name)
            end.wait(10)

    threads = [threading.Thread(target=enter, args=given) for given in (("a1", 50), ("a2", 50), ("a3", 50), ("b1", 50))]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    assert order == ["a1", "b1"], "a leaves a rest, and b is not behind those of a that wait"
    end.set()
    for thread in threads:
        thread.join(5)
    assert order == ["a1", "b1", "a2", "a3"]


# ---------------------------------------------------------------------- work, from headers


def scanned(width: int, height: int, more: int) -> bytes:
    """A progressive JPEG whose last scan, of 26 bytes, comes again and again; before each, an end in a comment."""
    data = pipes.encoded(Image.new("RGB", (width, height)), "JPEG", progressive=True)
    end = data.rindex(b"\xff\xd9")
    last = data[data.rindex(b"\xff\xda") : end]
    return data[:end] + (b"\xff\xfe\0\4\xff\xd9" + last) * more + data[end:]


@pytest.mark.case(108)
def test_scans_are_counted_as_the_decoder_reads_them() -> None:
    assert header.scans_of(pipes.encoded(tiny.picture(301, 77, 1), "JPEG")) == 1
    usual = pipes.encoded(tiny.picture(301, 77, 1), "JPEG", progressive=True)
    assert header.scans_of(usual) == 10
    assert header.scans_of(pipes.encoded(tiny.picture(301, 77, 1), "PNG")) == 1
    assert header.scans_of(scanned(64, 64, 500)) == 510
    # Marks within other segments and behind the end are none.
    assert header.scans_of(usual[:2] + b"\xff\xfe\0\x0a" + b"\xff\xda" * 4 + usual[2:] + b"\xff\xda" * 9) == 10
    for stop in range(0, len(usual), 7):
        assert 1 <= header.scans_of(usual[:stop]) <= 10
    assert header.scans_of(usual[:-2] + b"\xff\xfe\0\2" * 9000) > 4000


@pytest.mark.case(108)
def test_a_jpeg_of_many_scans_is_refused_before_they_are_decoded() -> None:
    bomb = scanned(8000, 6000, 1500)
    assert len(bomb) < 450_000
    begun = time.process_time()
    with pytest.raises(LimitError, match="1510 scans"):
        decode.open_bytes(bomb, LIMITS)
    assert time.process_time() - begun < 0.5, "decoding it takes a minute"
    assert decode.open_bytes(scanned(640, 480, 100), LIMITS).image.size == (640, 480), "small ones may have many"


@pytest.mark.case(108)
def test_an_images_time_follows_its_size() -> None:
    def seconds(data: bytes, modality: str = "image") -> float:
        task = tasks.DecodeTask(modality, Source("bytes", b"", data))
        return tasks.decode_type(LIMITS, 1).timeout_s(task)

    assert 8 <= seconds(flat_png(64, 64)) < 8.1
    assert seconds(flat_png(4000, 3000)) == pytest.approx(10.4, rel=0.01)
    assert seconds(flat_png(12000, 10000)) == seconds(b"no header") == LIMITS.work_timeout_s["image"]
    assert seconds(b"", "video") == LIMITS.work_timeout_s["video"]


@pytest.mark.case(61)
def test_who_leaves_the_gate_keeps_nobody_behind_waiting() -> None:
    gate, order, left = MemoryGate(10), [], CancelToken()

    def enter(name: str, num_bytes: int, cancel: CancelToken) -> None:
        try:
            with gate.within(num_bytes, cancel):
                order.append(name)
        except Cancelled:
            order.append(f"{name} left")

    with gate.within(6, CancelToken()):
        threads = [threading.Thread(target=enter, args=("huge", 99, left))]
        threads.append(threading.Thread(target=enter, args=("small", 4, CancelToken())))
        for thread in threads:
            thread.start()
            time.sleep(0.05)
        assert order == []
        left.cancel()
        for thread in threads:
            thread.join(5)
        assert order == ["huge left", "small"]
        enter("late", 1, left)
    assert order[-1] == "late left"
    with gate.within(10, CancelToken()):
        assert gate._left == 0, "all of it was given back"


@pytest.mark.parametrize("name", ["FITS", "PSD", "SVG", "MCIDAS", "WMF", "EMF", "AVIF", "HEIC"])
@pytest.mark.case(24)
def test_formats_that_are_not_wanted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    heads = {
        "FITS": b"SIMPLE  =                    T".ljust(80) + b"END".ljust(80),
        "PSD": b"8BPS\0\1" + bytes(6) + struct.pack(">HIIHH", 3, 8, 8, 8, 3),
        "SVG": b"<?xml version='1.0'?><svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>",
        "MCIDAS": b"\0\0\0\0\0\0\0\4" + bytes(248),
        "WMF": b"\xd7\xcd\xc6\x9a\0\0" + struct.pack("<hhhhH", 0, 0, 9, 9, 96) + bytes(64),
        "EMF": struct.pack("<II", 1, 108) + bytes(32) + b" EMF" + bytes(80),
        "AVIF": b"\0\0\0\x20ftypavif\0\0\0\0avifmif1" + bytes(64),
        "HEIC": b"\0\0\0\x20ftypheic\0\0\0\0heicmif1" + bytes(64),
    }
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a program was started"))
    with pytest.raises(DecodeError, match="Known formats: PNG, JPEG, WEBP, GIF, BMP"):
        decode.open_bytes(heads[name], LIMITS)


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (b"\0\0\0\x20ftypavif\0\0\0\0avifmif1" + bytes(64), "AVIF"),
        (b"\0\0\0\x20ftypmif1\0\0\0\0heicmif1" + bytes(64), "HEIC"),
        (b"II*\0" + bytes(64), "TIFF"),
        (b"\0\0\1\0" + bytes(64), "ICO"),
        (b"P6\n2 2 255\n" + bytes(12), "PPM"),
        (b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(64), "JPEG 2000"),
        (b"\xff\x0a" + bytes(64), "JPEG XL"),
        (b"\xef\xbb\xbf\n<svg viewBox='0 0 1 1'></svg>", "SVG"),
        (b"<!DOCTYPE html><html><body><svg/></body></html>", "HTML"),
    ],
)
def test_a_format_that_is_not_wanted_is_named(data: bytes, name: str) -> None:
    with pytest.raises(DecodeError, match=f"The bytes are {name}, which is not read. .*Known formats") as caught:
        decode.open_bytes(data, LIMITS)
    # What the operator may allow is offered for those formats alone that it would help.
    assert bool(caught.value.or_engine) == (name in ("AVIF", "HEIC", "TIFF", "ICO", "PPM"))


def test_a_text_has_no_format() -> None:
    with pytest.raises(DecodeError, match="The bytes are not an image that can be read"):
        decode.open_bytes(b"P60 or P5: a text", LIMITS)


@pytest.mark.parametrize("name", ["TIFF", "ICO", "EPS", "PDF", "PPM", "TGA", "JPEG2000", "DDS", "SGI", "PCX"])
@pytest.mark.case(24)
def test_formats_that_pillow_would_write(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = pipes.encoded(tiny.picture(32, 32, 1), name)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a program was started"))
    with pytest.raises(DecodeError):
        decode.open_bytes(data, LIMITS)


# ---------------------------------------------------------------------- videos


def changed(data: bytes, box: bytes, offset: int, value: bytes) -> bytes:
    """An MP4 with some bytes of a box, counted from behind its name, replaced."""
    place = data.index(box) + 4 + offset
    return data[:place] + value + data[place + len(value) :]


LIARS: dict[str, Callable[[bytes], bytes]] = {
    "0 ticks per second": lambda d: changed(d, b"mdhd", 12, bytes(4)),
    "negative duration": lambda d: changed(changed(d, b"mdhd", 16, b"\xff" * 4), b"mvhd", 16, b"\xff" * 4),
    "10^9 frames of one time": lambda d: changed(d, b"stts", 8, struct.pack(">I", 10**9)),
    "10^9 frames of no time": lambda d: changed(d, b"stts", 8, struct.pack(">II", 10**9, 0)),
    "10^9 frames of one size": lambda d: changed(d, b"stsz", 4, struct.pack(">II", 1, 10**9)),
    "10^9 frames with a size each": lambda d: changed(d, b"stsz", 8, struct.pack(">I", 10**9)),
    "10^9 chunks": lambda d: changed(d, b"stco", 4, struct.pack(">I", 10**9)),
    "chunks elsewhere": lambda d: changed(d, b"stco", 8, b"\x7f" * 4),
    "key frames nowhere": lambda d: changed(d, b"stss", 4, struct.pack(">II", 10**9, 0)),
    "65535 x 65535": lambda d: changed(d, b"mp4v", 24, b"\xff" * 4),
    "half an index": lambda d: d[: d.index(b"stsz") + 20],
    "no frames": lambda d: d[: d.index(b"mdat") + 4] + bytes(len(d) - d.index(b"mdat") - 4),
}


@pytest.fixture(scope="module")
def film(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """40 frames of 64 x 48 pixels."""
    frames = np.repeat(np.arange(40, dtype=np.uint8)[:, None, None, None] * 6, 48, 1).repeat(64, 2).repeat(3, 3)
    path: Path = tmp_path_factory.mktemp("film") / "v.mp4"
    return pipes.write_video(path, frames).read_bytes()


@pytest.mark.parametrize("name", LIARS)
@pytest.mark.case(28)
def test_videos_that_lie_cost_no_more_than_their_bytes(name: str, film: bytes) -> None:
    """Either its true frames, whatever the header says of them, or an error of the item; and soon."""
    begin = time.thread_time()
    with contextlib.suppress(DecodeError, LimitError):
        clip = video.open_bytes(LIARS[name](film), FrameSampling(), LIMITS)
        assert 0 < len(clip.frames) <= 32
        assert clip.frames.shape[1:] == (48, 64, 3)
        times = clip.timestamps_s()
        assert times is None or all(np.isfinite(times))
    assert time.thread_time() - begin < 2.0


@pytest.mark.case(28)
def test_an_avi_that_lies_about_its_rate_and_its_frames(tmp_path: Path) -> None:
    data = pipes.write_video(tmp_path / "v.avi", tiny.frames(6)).read_bytes()
    place = data.index(b"avih") + 8
    lying = data[:place] + bytes(4) + data[place + 4 : place + 16] + struct.pack("<I", 10**9) + data[place + 20 :]
    place = lying.index(b"strh") + 8
    lying = lying[: place + 20] + bytes(4) + bytes(4) + lying[place + 28 :]
    begin = time.thread_time()
    with contextlib.suppress(DecodeError):
        assert 0 < len(video.open_bytes(lying, FrameSampling(), LIMITS).frames) <= 6
    assert time.thread_time() - begin < 2.0


@pytest.mark.case(26)
def test_what_the_frames_of_a_video_take_is_bounded(film: bytes) -> None:
    one = 48 * 64 * 3
    assert len(video.open_bytes(film, FrameSampling(), MediaLimits(max_decoded_bytes=32 * one)).frames) == 32
    with pytest.raises(LimitError, match="frames of the video take"):
        video.open_bytes(film, FrameSampling(), MediaLimits(max_decoded_bytes=32 * one - 1))


@pytest.mark.case(108)
def test_frames_that_must_be_decoded_are_counted_before_any_is(film: bytes) -> None:
    """Of the first and the last, 4 of 40 frames, because the one with index 37 is a key; all of 40."""
    ends, whole = FrameSampling(num_frames=2), FrameSampling(num_frames=None)
    for sampling, count in ((ends, 4), (whole, 40)):
        work = count * 48 * 64
        assert len(video.open_bytes(film, sampling, MediaLimits(max_video_pixels=work)).frames) == (
            sampling.num_frames or 40
        )
        with pytest.raises(LimitError, match=f"{work} pixels would be decoded"):
            video.open_bytes(film, sampling, MediaLimits(max_video_pixels=work - 1))


def test_frames_after_a_key_frame_do_without_those_before() -> None:
    index = video._Index(100, tuple(range(100)), (0, 10, 20, 90))
    assert index.num_decoded([5, 9, 12, 25, 99]) == 6 + 4 + 3 + 6 + 10
    assert video._Index(100, None, ()).num_decoded([5, 99]) == 100


# ---------------------------------------------------------------------- sounds


def wav(rate: int, channels: int, frames: int, claimed_bytes: int | None = None) -> bytes:
    """Silence of 16 bits, whose header may claim anything."""
    data = bytes(frames * channels * 2)
    size = len(data) if claimed_bytes is None else claimed_bytes
    form = struct.pack("<HHIIHH", 1, channels, rate, rate * channels * 2 & 0xFFFFFFFF, channels * 2, 16)
    head = b"WAVEfmt " + struct.pack("<I", 16) + form + b"data" + struct.pack("<I", size & 0xFFFFFFFF)
    return b"RIFF" + struct.pack("<I", 36 + size & 0xFFFFFFFF) + head + data


def silence(seconds: int, rate: int, channels: int = 1) -> bytes:
    """FLAC, some hundred bytes a minute."""
    import av

    file = io.BytesIO()
    layout = "mono" if channels == 1 else "stereo"
    with av.open(file, "w", format="flac") as container:
        stream = container.add_stream("flac", rate=rate)
        stream.layout = layout
        frame = av.AudioFrame.from_ndarray(np.zeros((1, rate * channels), np.int16), format="s16", layout=layout)
        frame.rate = rate
        for second in range(seconds):
            frame.pts = second * rate
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()


@pytest.mark.parametrize("rate", [1, 999, 768_001, 2**31 - 1])
@pytest.mark.case(29)
def test_rates_that_no_sound_has(rate: int) -> None:
    with pytest.raises(DecodeError):
        audio.open_bytes(wav(rate, 1, 3000), LIMITS, 16000)
    with pytest.raises(DecodeError, match="sampling rate"):
        audio.from_array(np.zeros(9, np.float32), rate, LIMITS)


@pytest.mark.case(29)
def test_headers_of_sounds_that_lie() -> None:
    heard = audio.open_bytes(wav(16000, 1, 1600, 2**31), LIMITS, 16000)
    assert heard.given["seconds"] == 0.1, "what is there counts"
    for data in (wav(16000, 255, 1600), wav(16000, 1, 0), wav(16000, 0, 0)):
        with pytest.raises(DecodeError):
            audio.open_bytes(data, LIMITS, 16000)


@pytest.mark.case(29)
def test_silence_is_cut_off_as_it_is_decoded() -> None:
    """The bounds stop decoding; a sound that is long and of many channels is counted with all of them."""
    data = silence(60, 48000, channels=2)
    assert len(data) < 20_000
    assert len(audio.open_bytes(data, LIMITS, 16000).samples) == 60 * 16000
    with pytest.raises(LimitError, match="longer than 9 s"):
        audio.open_bytes(data, MediaLimits(max_audio_s=9.0), 16000)
    with pytest.raises(LimitError, match="more than 96000 samples"):
        audio.open_bytes(data, MediaLimits(max_audio_samples=96_000), 16000)


@pytest.mark.case(29)
def test_resampling_while_decoding_gives_the_same_samples() -> None:
    rng = np.random.default_rng(0)
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="flac") as container:
        stream = container.add_stream("flac", rate=44100)
        stream.layout = "stereo"
        frame = av.AudioFrame.from_ndarray(rng.normal(0, 3000, (1, 88200)).astype(np.int16), layout="stereo")
        frame.rate = 44100
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    data = file.getvalue()
    for rate in (16000, 48000):
        apart = audio.resampled(audio.open_bytes(data, LIMITS), rate)
        together = audio.open_bytes(data, LIMITS, rate)
        assert np.array_equal(apart.samples, together.samples)
        assert (apart.given, apart.lost, apart.rate) == (together.given, together.lost, together.rate)


@pytest.mark.case(77)
def test_an_image_of_many_wrong_tags_writes_no_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of 5,000 tags of a JPEG of 60 KB gave a line of its own in the server's log."""
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "JPEG")
    plain = file.getvalue()
    tags = b"".join(struct.pack(">HHII", 0x100 + number, 2, 65_520, 8) for number in range(5000))
    exif = b"Exif\0\0MM\0*\0\0\0\x08" + struct.pack(">H", 5000) + tags + bytes(4)
    data = plain[:2] + b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif + plain[2:]
    # Loading a worker's readers changes it.
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", Image.MAX_IMAGE_PIXELS)
    with warnings.catch_warnings(record=True) as written:
        warnings.simplefilter("always")
        decode_one = tasks.load_decoder(MediaLimits())
        assert decode_one(tasks.DecodeTask("image", Source("bytes", bytes(32), data))).opened is not None
    assert written == []


def test_image_formats_are_usual_or_all() -> None:
    assert MediaLimits.of({"image_formats": "all"}).image_formats == "all"
    with pytest.raises(ConfigError, match="image_formats must be usual or all, got 5"):
        MediaLimits.of({"image_formats": 5})
