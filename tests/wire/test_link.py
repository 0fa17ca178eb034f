"""Frames between processes: whole, large, broken, and what each leaves of the frames behind it."""

from __future__ import annotations

import errno
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from enum import StrEnum

import numpy as np
import pytest

from beheld.core.errors import ConfigError
from beheld.wire import link as link_module
from beheld.wire.codec import Codec
from beheld.wire.link import MAX_LABEL_BYTES, FrameError, Link, NoRoomError, pair

CODEC = Codec(())
HEAD = struct.Struct("<4sBIQ")
INLINE, SHARED = 0, 1


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, Link]]:
    """A raw end, and the link at the other; no descriptor is left behind."""
    before = len(os.listdir("/proc/self/fd"))
    ours, theirs = pair()
    yield ours, Link(theirs, CODEC)
    ours.close()
    theirs.close()
    assert len(os.listdir("/proc/self/fd")) == before


def frame(body: bytes, label: bytes = b"", magic: bytes = b"bhld", place: int = INLINE) -> bytes:
    return HEAD.pack(magic, place, len(label), len(body)) + label + body


def body(value: object) -> bytes:
    return b"".join(CODEC.encode(value))


@pytest.mark.parametrize("size", [0, 1, 64_000, 65_536, 65_537, 3_000_000])
def test_values_of_any_size_come_back_and_can_be_written_to(ends: tuple[socket.socket, Link], size: int) -> None:
    end, link = ends
    sent = np.arange(size, dtype=np.uint8)
    Link(end, CODEC).send({"array": sent}, label=b"x" * MAX_LABEL_BYTES)
    Link(end, CODEC).send("next")
    found = link.receive()["array"]
    # What is received later must not come to the same place.
    assert link.receive() == "next"
    assert np.array_equal(found, sent)
    found[:1] = 7


def test_18_20_broken_frames_cost_themselves_alone(ends: tuple[socket.socket, Link]) -> None:
    end, link = ends
    good = body({"a": [1, 2]})
    broken: dict[str, tuple[bytes, bytes | None]] = {
        "noise": (random.Random(0).randbytes(500), None),
        "pickle": (b"\x80\x04\x95\x1d\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix.", None),
        "short": (b"bhld", None),
        "another magic": (frame(good, b"me", magic=b"ZMTP"), None),
        "another place": (frame(good, b"me", place=7), None),
        "cut": (frame(good, b"me")[:-1], None),
        "more than told": (frame(good, b"me") + b"x", None),
        "label beyond the end": (HEAD.pack(b"bhld", INLINE, 1 << 31, 0), None),
        "far too large": (HEAD.pack(b"bhld", SHARED, 0, 1 << 62), None),
        "longer than a packet": (frame(b"x" * 140_000, b"me"), None),
        "no body": (frame(b"", b"me"), b"me"),
        "no JSON": (frame(b"\4" + b"\0" * 7 + b"nope", b"me"), b"me"),
        "an unknown class": (frame(body({}).replace(b'{"map"', b'{"mop"'), b"me"), b"me"),
        "memory that is missing": (HEAD.pack(b"bhld", SHARED, 2, 100) + b"me", b"me"),
    }
    for name, (data, label) in broken.items():
        end.send(data)
        end.send(frame(good))
        with pytest.raises(FrameError) as caught:
            link.receive()
        assert caught.value.label == label, name
        assert link.receive() == {"a": [1, 2]}, name
    assert link.num_unread == len(broken)


def test_18_files_that_hold_no_frame_are_closed(ends: tuple[socket.socket, Link]) -> None:
    end, link = ends
    head = HEAD.pack(b"bhld", SHARED, 2, 1000) + b"me"
    reading, writing = os.pipe()
    try:
        memory = os.memfd_create("short")
        os.write(memory, b"x" * 10)
        for files in ([reading], [memory], [memory, memory, memory]):
            socket.send_fds(end, [head], files)
            with pytest.raises(FrameError) as caught:
                link.receive(5.0)
            assert caught.value.label == b"me"
        os.close(memory)
    finally:
        os.close(reading)
        os.close(writing)
    Link(end, CODEC).send("next")
    assert link.receive() == "next"


def test_random_changes_never_reach_the_next_frame(ends: tuple[socket.socket, Link]) -> None:
    end, link = ends
    whole, chance = frame(body({"ids": tuple(range(40))}), b"label"), random.Random(3)
    for number in range(1000):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 5)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        end.send(data[: chance.randrange(1, len(data) + 1)])
        end.send(frame(body(number)))
        try:
            link.receive()
        except FrameError:
            assert link.receive() == number
        else:
            assert link.receive() == number


def test_memory_that_does_not_suffice_is_told_as_such(
    ends: tuple[socket.socket, Link], monkeypatch: pytest.MonkeyPatch
) -> None:
    end, link = ends

    def full(_: object) -> None:
        raise MemoryError

    end.send(frame(body(1), b"me"))
    monkeypatch.setattr(link._codec, "decode", full)
    with pytest.raises(FrameError) as caught:
        link.receive()
    assert isinstance(caught.value.__cause__, MemoryError)
    monkeypatch.undo()


def test_the_end_and_silence_are_told_apart(ends: tuple[socket.socket, Link]) -> None:
    end, link = ends
    begin = time.monotonic()
    with pytest.raises(TimeoutError):
        link.receive(0.05)
    assert time.monotonic() - begin < 2.0
    end.send(frame(body("late")))
    assert link.receive(1.0) == "late"
    end.close()
    with pytest.raises(EOFError):
        link.receive()
    with pytest.raises(OSError):
        link.send("x")


def test_a_sender_waits_while_the_other_reads_slowly(ends: tuple[socket.socket, Link]) -> None:
    end, link = ends
    sender = Link(end, CODEC)

    def fill() -> None:
        for _ in range(100):
            sender.send("x" * 60_000, 0.05)

    with pytest.raises(TimeoutError):
        fill()
    found: list[int] = []

    def read() -> None:
        while not found or found[-1] >= 0:
            value = link.receive()
            found.extend([value] if isinstance(value, int) else [])

    reader = threading.Thread(target=read)
    reader.start()
    for number in (*range(300), -5):
        sender.send(number)
    reader.join(10)
    assert found == [*range(300), -5]


def test_a_system_without_such_sockets_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(link_module.socket, "SOCK_SEQPACKET")
    with pytest.raises(ConfigError, match="thread"):
        pair()


def test_kept_files_are_written_again_only_when_they_were_read(ends: tuple[socket.socket, Link]) -> None:
    end, link = ends
    sender = Link(end, CODEC, max_kept=2)
    before = len(os.listdir("/proc/self/fd"))
    sizes = [100_000, 3_000_000, 200_000, 9_000_000, 70_000, 150_000, 3_000_000]
    rows = [np.random.default_rng(n).integers(0, 255, size, dtype=np.uint8) for n, size in enumerate(sizes)]
    # As many on their way as there may be, one more, and one that is too large to be kept.
    for row in rows[:4]:
        sender.send(row)
    found = [link.receive() for _ in range(4)]
    for row in rows[4:]:
        sender.send(row)
        found.append(link.receive())
    assert all(map(np.array_equal, found, rows))
    assert len(os.listdir("/proc/self/fd")) == before + 2
    sender.close()
    # Its end of the sockets, too.
    assert len(os.listdir("/proc/self/fd")) == before - 1


@pytest.mark.parametrize("step", ["written", "sent"])
def test_a_kept_file_that_is_not_sent_gives_its_room_back(
    step: str, ends: tuple[socket.socket, Link], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counted as unread for ever, so that after as many failures no file was kept."""
    end, link = ends
    sender = Link(end, CODEC, max_kept=2)
    before = len(os.listdir("/proc/self/fd"))
    row = np.arange(200_000, dtype=np.uint8)
    write, made, memory = link_module._write, [], link_module._memory

    def fails(*_: object) -> None:
        raise OSError(errno.ETOOMANYREFS, "no room")

    def half(file: int, pieces: list[object]) -> None:
        write(file, pieces[:1])  # type: ignore[arg-type]
        raise OSError(errno.ENOSPC, "no room")

    def counted() -> int:
        made.append(memory())
        return made[-1]

    for _ in range(3):
        with monkeypatch.context() as patch:
            if step == "sent":
                patch.setattr(socket, "send_fds", fails)
            else:
                patch.setattr(link_module, "_write", half)
            with pytest.raises(NoRoomError):
                sender.send(row)
    assert len(os.listdir("/proc/self/fd")) == before
    monkeypatch.setattr(link_module, "_memory", counted)
    for _ in range(4):
        sender.send(row)
        assert np.array_equal(link.receive(), row)
    assert len(made) == 1
    sender.close()


def test_what_is_wrong_with_a_kept_frame_costs_that_frame_alone(
    ends: tuple[socket.socket, Link], monkeypatch: pytest.MonkeyPatch
) -> None:
    end, link = ends
    sender = Link(end, CODEC, max_kept=1)

    def full(_: object) -> None:
        raise MemoryError

    row = np.zeros(100_000, np.uint8)
    sender.send(row, label=b"me")
    monkeypatch.setattr(link._codec, "decode", full)
    with pytest.raises(FrameError) as caught:
        link.receive()
    assert caught.value.label == b"me"
    monkeypatch.undo()
    (file,) = sender._kept
    head = HEAD.pack(b"bhld", 2, 2, 1000) + b"me"
    memory = os.memfd_create("short")
    os.write(memory, b"x" * 1000)
    reading, writing = os.pipe()
    for bad in (memory, reading):
        socket.send_fds(end, [head], [bad])
        with pytest.raises(FrameError) as caught:
            link.receive(5.0)
        assert caught.value.label == b"me"
    sender.send(row)
    assert sender._kept == [file]
    assert np.array_equal(link.receive(), row)
    for bad in (memory, reading, writing, file):
        os.close(bad)


class _Colour(StrEnum):
    RED = "red"


def test_enumerations_arrive_as_themselves_or_not_at_all() -> None:
    """A text in place of one has none of its methods, which its receiver finds only when it asks for them."""
    codec = Codec((_Colour,))
    assert type(codec.decode(b"".join(codec.encode([_Colour.RED])))[0]) is _Colour
    with pytest.raises(ConfigError, match="_Colour cannot leave"):
        CODEC.encode([_Colour.RED])
