"""The inbox of the engine's process: nothing is lost or overtakes, whoever reads."""

from __future__ import annotations

import os
import random
import struct
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from beheld.engine.codec import CODEC
from beheld.engine.label import label_of
from beheld.engine.messages import Message, Ping, Prepared, Unread
from beheld.engine.process import _LinkInbox
from beheld.wire.link import Link, pair


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Link, _LinkInbox]]:
    """The other side, and the inbox."""
    # With the other side the inbox ends its process, which here is the tests'.
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setattr(threading, "excepthook", lambda told: None)
    ours, theirs = pair()
    before = set(threading.enumerate())
    other, inbox = Link(ours, CODEC), _LinkInbox(Link(theirs, CODEC))
    (reader,) = set(threading.enumerate()) - before
    yield other, inbox
    other.close()
    reader.join(10)
    assert not reader.is_alive()
    theirs.close()
    for file in (inbox._news, inbox._pause):
        os.close(file)


@pytest.mark.parametrize("seed", range(4))
def test_messages_come_whole_and_in_order_whether_the_engine_waits_or_computes(
    ends: tuple[Link, _LinkInbox], seed: int
) -> None:
    other, inbox = ends
    chance, count = random.Random(seed), 400

    def speak() -> None:
        own = random.Random(-seed)
        for number in range(count):
            other.send(Ping(number))
            if own.random() < 0.2:
                time.sleep(own.choice([0.0, 0.0005, 0.002]))

    speaker = threading.Thread(target=speak)
    speaker.start()
    found: list[Message] = []
    while len(found) < count:
        # As serve does it: wait, take what else is there, compute for a while, take what has come.
        message: Message | None = inbox.wait()
        while message is not None:
            found.append(message)
            message = inbox.poll()
        for _ in range(chance.randrange(3)):
            time.sleep(chance.choice([0.0, 0.001]))
            while (message := inbox.poll()) is not None:
                found.append(message)
    speaker.join()
    assert found == [Ping(number) for number in range(count)]


def test_what_threads_put_in_wakes_an_engine_that_waits(ends: tuple[Link, _LinkInbox]) -> None:
    other, inbox = ends
    for number in range(20):
        timer = threading.Timer(0.002, inbox.put, [Prepared(str(number), None)])
        timer.start()
        assert inbox.wait() == Prepared(str(number), None)
        timer.join()
        # Also what was put in while it computed, and what comes by the link afterwards.
        inbox.put(Prepared("computing", None))
        assert inbox.wait() == Prepared("computing", None)
        other.send(Ping(number))
        assert inbox.wait() == Ping(number)


def test_a_frame_that_cannot_be_read_reaches_an_engine_that_waits_and_one_that_computes(
    ends: tuple[Link, _LinkInbox],
) -> None:
    other, inbox = ends
    label = label_of(Ping(7))
    broken = struct.pack("<4sBIQ", b"bhld", 0, len(label), 4) + label + b"nope"
    for data in (broken, b"noise"):
        timer = threading.Timer(0.01, lambda data=data: other._end.send(data))
        timer.start()
        if data is broken:
            assert inbox.wait() == Unread((), 7)
        timer.join()
    # Noise says not whom it concerns: what comes behind it is next.
    other.send(Ping(8))
    assert inbox.wait() == Ping(8)
    other._end.send(broken)
    deadline = time.monotonic() + 10
    while (found := inbox.poll()) is None and time.monotonic() < deadline:
        time.sleep(0.001)
    assert found == Unread((), 7)


def test_what_is_being_read_as_the_engine_begins_to_wait_is_not_forgotten(
    ends: tuple[Link, _LinkInbox], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread has taken the message from the socket, and puts it into the queue when the engine already waits."""
    other, inbox = ends
    taken, queue = threading.Event(), inbox._queue

    class Slow:
        get_nowait = queue.get_nowait

        def put(self, message: Message) -> None:
            taken.set()
            time.sleep(0.05)
            queue.put(message)

    monkeypatch.setattr(inbox, "_queue", Slow())
    found: list[Message] = []
    for number in range(3):
        taken.clear()
        other.send(Ping(number))
        assert taken.wait(10)
        waiting = threading.Thread(target=lambda: found.append(inbox.wait()), daemon=True)
        waiting.start()
        waiting.join(5)
        assert not waiting.is_alive()
    assert found == [Ping(number) for number in range(3)]
