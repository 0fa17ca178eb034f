"""Several fronts have one engine: each hears of its own requests and calls, and of the engine's state."""

from __future__ import annotations

import errno
import os
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from beheld.core.outputs import TokenEvent
from beheld.core.pooling_params import Pooling
from beheld.core.request import FinishReason, LoRARequest, Request
from beheld.core.sleep import EnginePart, PauseMode
from beheld.engine.codec import CODEC
from beheld.engine.label import label_of
from beheld.engine.messages import (
    Abort,
    AddLoRA,
    Asleep,
    ClearCache,
    Died,
    Events,
    LoRAAdded,
    Message,
    Ping,
    Pong,
    Reply,
    Sleep,
    Stop,
    Submit,
    Unread,
    WakeUp,
    WakingUp,
)
from beheld.engine.shared_engine import FrontRelay, RelayedEngine, SharedEngine
from beheld.engine.stats import EngineReport, EngineState, EngineStats
from beheld.wire.link import Link, pair
from tests.engine.test_data_parallel import COUNTS

PARAMS = Pooling.__new__(Pooling)


class Recorder:
    """An engine that a test answers for."""

    def __init__(self) -> None:
        self.alive = True
        self.messages: list[Message] = []
        self.answer: Any = None

    def start(self, receive: Any) -> None:
        self.answer = receive

    def send(self, message: Message) -> None:
        self.messages.append(message)

    def reports(self) -> tuple[EngineReport, ...]:
        return ()

    def close(self) -> None:
        self.alive = False

    def tokens(self, *names: str) -> None:
        """A step with a token of each of these."""
        self.answer(Events(tuple(TokenEvent(name, (7,)) for name in names)))


class Seen(list[Reply]):
    """What a front has received."""

    def names(self) -> list[str]:
        return [event.request_id for reply in self if isinstance(reply, Events) for event in reply.events]


def submit(*names: str) -> Submit:
    return Submit(tuple(Request(name, (1, 2), PARAMS) for name in names))


@pytest.fixture
def fronts() -> tuple[Recorder, SharedEngine, Seen, list[Any], list[Seen]]:
    """The engine, and what three fronts have received."""
    engine, seen = Recorder(), [Seen(), Seen(), Seen()]
    shared = SharedEngine(engine)
    shared.start(seen[0].append)
    return engine, shared, seen[0], [shared.view(each.append) for each in seen[1:]], seen[1:]


def test_each_front_gets_the_events_of_its_requests_in_order(fronts: Any) -> None:
    engine, shared, own, views, others = fronts
    shared.send(submit("a", "b"))
    views[0].send(submit("c"))
    views[1].send(submit("d", "e"))
    engine.tokens("c", "a", "e", "d", "b", "c")
    assert own.names() == ["a", "b"]
    assert [each.names() for each in others] == [["c", "c"], ["e", "d"]]
    engine.tokens("a", "b")
    assert len(own) == 2


def test_a_step_of_the_first_fronts_requests_passes_as_it_is(fronts: Any) -> None:
    engine, _shared, own, views, _ = fronts
    views[0].send(submit("c"))
    step = Events((TokenEvent("a", (1,)),))
    engine.answer(step)
    assert own[-1] is step


def test_an_id_is_free_after_its_last_event(fronts: Any) -> None:
    engine, _, _, views, others = fronts
    views[0].send(submit("c"))
    engine.answer(Events((TokenEvent("c", (1,), FinishReason.STOP),)))
    views[1].send(submit("c"))
    engine.tokens("c")
    assert [each.names() for each in others] == [["c"], ["c"]]
    views[1].send(Stop("c"))
    views[0].send(submit("c"))
    engine.tokens("c")
    assert others[0].names() == ["c", "c"]


def test_an_id_that_another_front_has_is_refused(fronts: Any) -> None:
    engine, _, _, views, others = fronts
    views[0].send(submit("c"))
    views[1].send(submit("c", "d"))
    assert [request.id for request in engine.messages[-1].requests] == ["d"]
    ((event,),) = (reply.events for reply in others[1])
    assert (event.request_id, event.finish) == ("c", FinishReason.ERROR)
    engine.tokens("c", "d")
    assert [each.names() for each in others] == [["c"], ["c", "d"]]


def test_answers_go_to_the_front_that_asked(fronts: Any) -> None:
    engine, shared, own, views, others = fronts
    shared.send(Ping(0))
    views[0].send(Ping(1))
    views[1].send(AddLoRA(2, LoRARequest("x", 1, "/x")))
    for reply in (LoRAAdded(2, None), Pong(1, stats()), Pong(0, stats())):
        engine.answer(reply)
    numbers = [[reply.number for reply in each] for each in (own, *others)]
    assert numbers == [[0], [1], [2]]


def test_all_fronts_hear_that_the_engine_sleeps_wakes_up_and_dies(fronts: Any) -> None:
    engine, shared, own, views, others = fronts
    views[0].send(Sleep(1, 1, PauseMode.ABORT))
    asleep = Asleep(1, frozenset({EnginePart.KV_CACHE}))
    engine.answer(asleep)
    # One that joins later hears it, too.
    late = Seen()
    shared.view(late.append)
    shared.send(WakeUp(3, frozenset(EnginePart)))
    awake = Asleep(3, frozenset())
    engine.answer(awake)
    engine.answer(Died("x"))
    assert own == [asleep, awake, Died("x")]
    assert others == [[asleep, WakingUp(3), awake, Died("x")]] * 2
    assert late == others[0]
    last = Seen()
    shared.view(last.append)
    assert last == []


def test_requests_of_a_front_that_ends_are_aborted(fronts: Any) -> None:
    engine, _, own, views, others = fronts
    views[0].send(submit("c", "d"))
    views[0].send(Ping(1))
    views[1].send(submit("e"))
    engine.answer(Events((TokenEvent("d", (1,), FinishReason.STOP),)))
    views[0].leave()
    assert engine.messages[-1] == Abort(("c",))
    engine.answer(Events((TokenEvent("c", (), FinishReason.ABORT), TokenEvent("e", (1,)))))
    engine.answer(Pong(1, stats()))
    engine.answer(Died("x"))
    assert others[0].names() == ["d"]
    assert others[1] == [Events((TokenEvent("e", (1,)),)), Died("x")]
    assert own.names() == []


def test_an_unreadable_message_concerns_those_whose_it_was(fronts: Any) -> None:
    engine, _, own, views, others = fronts
    views[0].send(submit("c"))
    views[1].send(Ping(2))
    engine.answer(Unread(("a", "c")))
    assert own == [Unread(("a",))]
    assert others == [[Unread(("c",))], []]
    engine.answer(Pong(2, stats()))
    assert others[1] == [Pong(2, stats())]


def test_all_fronts_hear_that_an_order_to_wake_up_was_unreadable(fronts: Any) -> None:
    """Each believes that the engine wakes up until its number is answered, and meanwhile does not miss its answers."""
    engine, shared, own, views, others = fronts
    views[0].send(WakeUp(1, frozenset(EnginePart)))
    shared.send(WakeUp(0, frozenset(EnginePart)))
    engine.answer(Unread((), 1))
    engine.answer(Unread((), 0))
    unread = [Unread((), 1), Unread((), 0)]
    assert own[-2:] == others[0][-2:] == others[1][-2:] == unread


def test_what_a_new_front_hears_first_is_not_older_than_what_it_hears_next(fronts: Any) -> None:
    engine, shared, _, _, _ = fronts
    engine.answer(Asleep(0, frozenset({EnginePart.KV_CACHE})))
    heard: list[Reply] = []
    woken: list[threading.Thread] = []

    def receive(reply: Reply) -> None:
        if not woken:
            # The engine wakes up just now.
            woken.append(threading.Thread(target=engine.answer, args=(Asleep(2, frozenset()),)))
            woken[0].start()
            woken[0].join(0.2)
        heard.append(reply)

    shared.view(receive)
    woken[0].join()
    assert heard[-1] == Asleep(2, frozenset())


def stats(**more: Any) -> EngineStats:
    return EngineStats(COUNTS, steps=1, retried=0, **more)


# ---- over a connection -----------------------------------------------------------------------------------------------


class Relayed:
    """A front at the other end of a connection."""

    def __init__(self, shared: SharedEngine) -> None:
        ours, theirs = pair()
        self.seen, self.ended = Seen(), list[bool]()
        self.ours, self.end = ours, theirs
        self.relay = FrontRelay(shared, Link(ours, CODEC), lambda: self.ended.append(True))
        self.engine = RelayedEngine(Link(theirs, CODEC))
        self.engine.start(self.seen.append)


def until(met: Any) -> None:
    deadline = time.monotonic() + 10
    while not met():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture
def relayed() -> Iterator[tuple[Recorder, SharedEngine, Relayed]]:
    engine = Recorder()
    shared = SharedEngine(engine)
    shared.start(lambda reply: None)
    made = Relayed(shared)
    yield engine, shared, made
    made.engine.close()
    until(lambda: made.ended)
    made.ours.close()


def test_messages_and_events_cross_and_come_back(relayed: Any) -> None:
    engine, _shared, front = relayed
    front.engine.send(Submit((Request("c", (1, 2), Pooling("mean"), prompt="text"),)))
    front.engine.send(ClearCache())
    until(lambda: len(engine.messages) == 2)
    (request,) = engine.messages[0].requests
    assert (request.id, request.token_ids, request.prompt) == ("c", (1, 2), None)
    engine.tokens("c", "a")
    engine.answer(Events((TokenEvent("c", (8,), FinishReason.LENGTH, num_cached=3),)))
    report = EngineReport(0, EngineState.SERVING, 2, 3, 4, stats())
    front.engine.send(Ping(1))
    until(lambda: len(engine.messages) == 3)
    engine.answer(Pong(1, stats(engines=(report,))))
    until(lambda: len(front.seen) == 3)
    assert front.seen[0] == Events((TokenEvent("c", (7,)),))
    assert front.seen[1].events[0].num_cached == 3
    assert front.engine.reports() == (report,)


def test_a_front_whose_process_ends_leaves_nothing_running(relayed: Any) -> None:
    engine, _shared, front = relayed
    front.engine.send(Submit((Request("c", (1, 2), Pooling("mean")),)))
    until(lambda: engine.messages)
    front.end.shutdown(2)
    until(lambda: front.ended)
    assert engine.messages[-1] == Abort(("c",))
    # The front's side has no engine any more.
    until(lambda: not front.engine.alive)
    assert isinstance(front.seen[-1], Died)


def test_a_dead_engine_is_dead_for_a_relayed_front(relayed: Any) -> None:
    engine, _shared, front = relayed
    engine.answer(Died("it fell"))
    until(lambda: front.seen == [Died("it fell")])
    assert not front.engine.alive


@pytest.fixture
def no_room(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """No descriptor for a memory file while the list holds an error's number."""
    lacks, made = list[int](), os.memfd_create

    def memory(*given: Any) -> int:
        if lacks:
            raise OSError(lacks[0], os.strerror(lacks[0]))
        return made(*given)

    monkeypatch.setattr(os, "memfd_create", memory)
    yield lacks
    lacks.clear()


@pytest.mark.case(134)
@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENOMEM])
def test_without_room_for_a_large_reply_its_requests_fail_and_others_go_on(
    relayed: Any, no_room: list[int], code: int
) -> None:
    engine, _shared, front = relayed
    front.engine.send(submit("c", "d"))
    until(lambda: engine.messages)
    no_room.append(code)
    engine.answer(Events((TokenEvent("c", tuple(range(1 << 17))),)))
    until(lambda: front.seen == [Unread(("c",))])
    # Both sides know that nobody waits for its end.
    until(lambda: engine.messages.count(Abort(("c",))) == 2)
    no_room.clear()
    engine.tokens("d")
    until(lambda: len(front.seen) == 2)
    assert front.seen.names() == ["d"]


@pytest.mark.case(134)
def test_without_room_for_a_large_message_its_requests_fail_and_others_go_on(relayed: Any, no_room: list[int]) -> None:
    engine, _shared, front = relayed
    no_room.append(errno.ENFILE)
    front.engine.send(Submit((Request("c", tuple(range(1 << 17)), PARAMS),)))
    until(lambda: front.seen)
    ((event,),) = (reply.events for reply in front.seen)
    assert (event.request_id, event.finish) == ("c", FinishReason.ERROR)
    assert "no descriptors" in str(event.error)
    front.engine.send(submit("d"))
    until(lambda: engine.messages)
    assert [request.id for request in engine.messages[0].requests] == ["d"]


def test_a_broken_frame_fails_its_request_alone(relayed: Any) -> None:
    engine, _shared, front = relayed
    packet, label = b"{}", label_of(submit("c"))
    front.end.send(struct.pack("<4sBIQ", b"bhld", 0, len(label), len(packet)) + label + packet)
    until(lambda: front.seen == [Unread(("c",))])
    front.engine.send(Ping(5))
    until(lambda: engine.messages == [Abort(("c",)), Ping(5)])
