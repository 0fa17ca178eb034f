"""Several engines answer as one: no answer is lost, doubled or crossed, whatever dies and when."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest

from beheld.core.config import EngineArgs
from beheld.core.errors import CapacityError, ConfigError, EngineDeadError, LoRAError, StepError
from beheld.core.outputs import TokenEvent
from beheld.core.pooling_params import Pooling
from beheld.core.request import FinishReason, LoRARequest, Request
from beheld.core.sleep import EnginePart, PauseMode, lost_at
from beheld.engine.data_parallel import DataParallelEngines
from beheld.engine.messages import (
    Abort,
    AddLoRA,
    Asleep,
    ClearCache,
    Died,
    Engine,
    Events,
    LoRAAction,
    LoRAAdded,
    LoRAsManaged,
    ManageLoRA,
    Message,
    Ping,
    Pong,
    Reply,
    Sleep,
    Stop,
    Submit,
    Unread,
    WakeUp,
)
from beheld.engine.process_group import environments
from beheld.engine.routing import Router
from beheld.engine.stats import EngineState, EngineStats
from beheld.platform.cuda_driver import DRIVER
from beheld.scheduler.step_builder import SchedulerStats
from tests.long import sized

PARAMS: Any = Pooling.__new__(Pooling)
LENGTH = 5
COUNTS = SchedulerStats(1, 2, (3,), (4,), (5,), 6, 7, 8, 9, 10, 11, 12)


def request(name: str, *, restartable: bool = False) -> Request:
    return Request(name, (1, 2, 3), PARAMS, restartable=restartable)


def tokens_of(events: list[TokenEvent]) -> list[int]:
    """The tokens of an answer, as who collects them sees it."""
    found: list[int] = []
    for event in events:
        found = [] if event.restarted else [*found, *event.token_ids]
    return found


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that died one soon after the other are replaced without a wait."""
    monkeypatch.setattr("beheld.engine.data_parallel._RESTART_S", 0.001)


class StubEngine:
    """An engine whose steps a test takes: the tokens of a request are its number, then the positions."""

    def __init__(self) -> None:
        self.alive = True
        self.receive: Any = None
        self.closed = False
        self.positions: dict[str, int] = {}
        self.messages: list[Message] = []
        self.answers_pings = True
        self.lora_error: LoRAError | None = None
        self.wake_error: CapacityError | None = None
        self.lacks = frozenset[EnginePart]()

    def start(self, receive: Any) -> None:
        self.receive = receive

    def send(self, message: Message) -> None:
        assert not self.closed
        self.messages.append(message)
        if not self.alive:
            return
        if isinstance(message, Submit):
            for each in message.requests:
                assert each.id not in self.positions, "a request was submitted twice"
                self.positions[each.id] = 0
        elif isinstance(message, Abort):
            for name in message.request_ids:
                if self.positions.pop(name, None) is not None:
                    self.receive(Events((TokenEvent(name, (), FinishReason.ABORT),)))
        elif isinstance(message, Stop):
            self.positions.pop(message.request_id, None)
        elif isinstance(message, Ping) and self.answers_pings:
            self.receive(Pong(message.number, EngineStats(COUNTS, steps=1, retried=0, held_bytes=5)))
        elif isinstance(message, AddLoRA):
            self.receive(LoRAAdded(message.number, self.lora_error))
        elif isinstance(message, Sleep):
            self.lacks = lost_at(message.level)
            self.receive(Asleep(message.number, self.lacks))
        elif isinstance(message, WakeUp):
            self.lacks -= message.parts if self.wake_error is None else frozenset()
            self.receive(Asleep(message.number, self.lacks, self.wake_error))
        elif isinstance(message, ManageLoRA):
            self.receive(LoRAsManaged(message.number, message.lora_int_id == 3, (3, id(self) % 7 + 10)))

    def step(self, name: str) -> None:
        """The next token of a request."""
        position = self.positions[name]
        self.positions[name] += 1
        finish = None
        if position + 1 == LENGTH:
            finish = FinishReason.LENGTH
            del self.positions[name]
        self.receive(Events((TokenEvent(name, (int(name) * 100 + position,), finish),)))

    def die(self) -> None:
        self.alive = False
        self.receive(Died("the test ended it"))

    def close(self) -> None:
        self.alive, self.closed = False, True


class Stubs:
    """Stub engines behind a front, all that the front received, and successors of the dead."""

    def __init__(self, count: int) -> None:
        self.engines = [StubEngine() for _ in range(count)]
        self.all: list[StubEngine] = list(self.engines)
        self.received: list[Reply] = []
        self.failures = 0
        self.gate = threading.Event()
        self.gate.set()
        self.front = DataParallelEngines(self.engines, self, Router(count, 1000, 512))
        self.front.start(self.received.append)

    def restart(self, index: int) -> Engine:
        self.gate.wait(10)
        if self.failures:
            self.failures -= 1
            raise EngineDeadError("It does not start.")
        made = StubEngine()
        self.engines[index] = made
        self.all.append(made)
        return made

    def cancel(self) -> None:
        self.gate.set()

    def settle(self) -> None:
        """Wait until each dead engine has its successor."""
        for thread in self.front._threads:
            thread.join(10)

    def events(self, name: str) -> list[TokenEvent]:
        return [e for r in self.received if isinstance(r, Events) for e in r.events if e.request_id == name]

    def owner(self, name: str) -> StubEngine:
        (found,) = [engine for engine in self.engines if name in engine.positions]
        return found

    def stats(self, number: int = 10**6) -> EngineStats:
        self.front.send(Ping(number))
        (pong,) = [r for r in self.received if isinstance(r, Pong) and r.number == number]
        return pong.stats


@pytest.mark.parametrize("seed", range(sized(10, 300)))
def test_random_deaths_lose_double_and_cross_nothing(seed: int) -> None:
    draw = random.Random(seed)
    stubs = Stubs(draw.randrange(2, 5))
    submitted: list[str] = []
    ended: set[str] = set()
    for _ in range(draw.randrange(50, 300)):
        act = draw.choices(("submit", "step", "die", "abort", "stop", "ping"), (6, 20, 1, 1, 1, 1))[0]
        busy = [(engine, name) for engine in stubs.engines for name in engine.positions if engine.alive]
        if act == "submit":
            names = [str(len(submitted) + i) for i in range(draw.randrange(1, 4))]
            submitted += names
            whole = draw.random() < 0.5
            stubs.front.send(Submit(tuple(request(name, restartable=whole) for name in names)))
        elif act == "step" and busy:
            engine, name = draw.choice(busy)
            engine.step(name)
        elif act == "die":
            living = [engine for engine in stubs.engines if engine.alive and engine.receive is not None]
            if len(living) > 1:
                draw.choice(living).die()
                if draw.random() < 0.7:
                    stubs.settle()
        elif act in ("abort", "stop") and busy:
            _, name = draw.choice(busy)
            ended.add(name)
            stubs.front.send(Abort((name,)) if act == "abort" else Stop(name))
        elif act == "ping":
            stubs.stats(len(stubs.received))
    stubs.settle()
    while busy := [(engine, name) for engine in stubs.engines for name in engine.positions]:
        busy[0][0].step(busy[0][1])
    for name in submitted:
        events = stubs.events(name)
        tokens = tokens_of(events)
        assert tokens == [int(name) * 100 + position for position in range(len(tokens))]
        finishes = [event.finish for event in events if event.finish is not None]
        if name in ended:
            assert len(finishes) <= 1
            continue
        assert len(finishes) == 1
        assert events[-1].finish is finishes[0]
        if finishes[0] is FinishReason.ERROR:
            assert isinstance(events[-1].error, StepError)
        else:
            assert len(tokens) == LENGTH
    stats = stubs.stats()
    assert sum(report.num_requests for report in stats.engines) == 0
    assert all(report.load == 0 for report in stats.engines)
    stubs.front.close()
    assert all(engine.closed for engine in stubs.all)


def test_only_unseen_requests_move_and_only_once() -> None:
    stubs = Stubs(3)
    stubs.front.send(Submit(tuple(request(str(i)) for i in range(3))))
    first = stubs.owner("0")
    stubs.front.send(Submit((request("3"),)))
    seen = next(name for name in first.positions)
    first.step(seen)
    unseen = [name for name in first.positions if name != seen]
    first.die()
    assert isinstance(stubs.events(seen)[-1].error, StepError)
    for name in unseen:
        assert stubs.owner(name) is not first
    stubs.settle()
    moved = unseen[0] if unseen else "3"
    again = stubs.owner(moved)
    again.die()
    (event,) = stubs.events(moved)
    assert event.error is not None
    assert "has died" in str(event.error)
    stubs.front.close()


def test_an_answer_that_is_read_at_its_end_begins_anew_once() -> None:
    stubs = Stubs(3)
    stubs.front.send(Submit(tuple(request(str(i), restartable=True) for i in range(3))))
    first = stubs.owner("0")
    first.step("0")
    first.step("0")
    first.die()
    assert [event.restarted for event in stubs.events("0")] == [False, False, True]
    second = stubs.owner("0")
    assert second is not first
    for _ in range(LENGTH):
        second.step("0")
    assert tokens_of(stubs.events("0")) == [0, 1, 2, 3, 4]
    assert stubs.events("0")[-1].finish is FinishReason.LENGTH
    stubs.settle()
    stubs.front.send(Submit((request("7", restartable=True),)))
    for _ in range(2):
        stubs.owner("7").step("7")
        stubs.owner("7").die()
        stubs.settle()
    assert isinstance(stubs.events("7")[-1].error, StepError)
    routing = stubs.stats().routing
    assert routing is not None
    assert routing.num_lost == 1
    stubs.front.close()


def test_an_aborted_request_does_not_move() -> None:
    stubs = Stubs(2)
    stubs.front.send(Submit((request("1", restartable=True),)))
    first = stubs.owner("1")
    first.step("1")
    # It dies before it has read the message.
    held, first.alive = first.receive, False
    stubs.front.send(Abort(("1",)))
    held(Died("the test ended it"))
    assert [event.finish for event in stubs.events("1")] == [None, FinishReason.ABORT]
    assert all("1" not in engine.positions for engine in stubs.engines if engine is not first)
    routing = stubs.stats().routing
    assert routing is not None
    assert (routing.num_lost, routing.num_retried) == (0, 0)
    stubs.front.close()


def test_the_end_of_a_script_that_closes_nothing_is_no_death() -> None:
    stubs = Stubs(2)
    # As the interpreter does at its end.
    stubs.front._at_exit._run()
    stubs.engines[0].die()
    assert stubs.received == []
    assert stubs.front._threads == []
    stubs.front.close()


def test_last_death_is_the_death_of_all() -> None:
    stubs = Stubs(2)
    stubs.gate.clear()
    stubs.engines[0].die()
    assert stubs.front.alive
    stubs.front.send(Submit((request("1"),)))
    stubs.engines[1].die()
    assert not stubs.front.alive
    assert isinstance(stubs.received[-1], Died)
    stubs.front.close()
    assert all(engine.closed for engine in stubs.all)


def test_successor_has_the_adapters_and_serves() -> None:
    stubs = Stubs(2)
    lora = AddLoRA(7, LoRARequest("style", 3, "/style"))
    stubs.front.send(lora)
    assert [r for r in stubs.received if isinstance(r, LoRAAdded)] == [LoRAAdded(7, None)]
    stubs.engines[0].die()
    stubs.settle()
    assert stubs.engines[0].messages == [lora]
    assert stubs.stats().engines[0].restarts == 1
    stubs.front.send(ManageLoRA(8, LoRAAction.REMOVE, 3))
    assert stubs.received[-1].found  # type: ignore[union-attr]
    stubs.engines[1].die()
    stubs.settle()
    assert stubs.engines[1].messages == []
    stubs.front.close()


def test_all_engines_sleep_and_so_does_one_that_starts_meanwhile() -> None:
    stubs = Stubs(3)
    stubs.front.send(Sleep(1, 2, PauseMode.WAIT))
    everything = frozenset(EnginePart)
    assert stubs.received == [Asleep(1, everything)]
    stubs.engines[0].die()
    stubs.settle()
    # It has no request that would have to end first.
    assert stubs.engines[0].messages == [Sleep(1, 2, PauseMode.ABORT)]
    assert stubs.engines[0].lacks == everything
    stubs.engines[1].wake_error = CapacityError("Others have the memory.")
    stubs.front.send(WakeUp(2, everything))
    assert stubs.received[-1] == Asleep(2, everything, stubs.engines[1].wake_error)
    stubs.engines[1].wake_error = None
    stubs.front.send(WakeUp(3, everything))
    assert stubs.received[-1] == Asleep(3, frozenset())
    stubs.engines[2].die()
    stubs.settle()
    assert stubs.engines[2].messages == []
    stubs.front.close()


def test_an_answer_of_before_does_not_wake_an_engine_that_starts() -> None:
    stubs = Stubs(3)
    everything = frozenset(EnginePart)
    stubs.front.send(Sleep(1, 2, PauseMode.WAIT))
    slow = stubs.engines[1]
    # Its answers come late: to the order to wake up, after all have been sent the next order to sleep.
    slow.receive, receive = (late := list[Reply]()).append, slow.receive
    stubs.front.send(WakeUp(2, everything))
    stubs.front.send(Sleep(3, 1, PauseMode.WAIT))
    for reply in late:
        receive(reply)
    slow.receive = receive
    assert stubs.received[-2:] == [Asleep(2, frozenset()), Asleep(3, everything)]
    stubs.engines[0].die()
    stubs.settle()
    assert stubs.engines[0].lacks == everything
    stubs.front.close()


def test_orders_to_sleep_do_not_pile_up() -> None:
    stubs = Stubs(2)
    for number in range(0, 60, 3):
        stubs.front.send(Sleep(number, 2, PauseMode.WAIT))
        stubs.front.send(Sleep(number + 1, 1, PauseMode.WAIT))
        stubs.engines[1].wake_error = CapacityError("Others have the memory.")
        stubs.front.send(WakeUp(number + 2, frozenset({EnginePart.WEIGHTS})))
    stubs.engines[0].die()
    stubs.settle()
    # Of all levels, the deepest.
    assert stubs.engines[0].messages == [
        Sleep(58, 2, PauseMode.ABORT),
        WakeUp(59, frozenset({EnginePart.WEIGHTS})),
    ]
    stubs.front.close()


def test_an_engine_that_starts_has_the_weights_that_the_others_read_again() -> None:
    stubs = Stubs(2)
    again = WakeUp(2, frozenset({EnginePart.WEIGHTS}), again=True)
    stubs.front.send(again)
    stubs.engines[0].die()
    stubs.settle()
    # It has read the files as they are.
    assert stubs.engines[0].messages == []
    stubs.front.send(Sleep(3, 2, PauseMode.ABORT))
    for _ in range(9):
        stubs.front.send(again)
    stubs.engines[1].die()
    stubs.settle()
    assert stubs.engines[1].messages == [Sleep(3, 2, PauseMode.ABORT), again]
    stubs.front.close()


def test_messages_for_all_reach_all_and_are_answered_once() -> None:
    stubs = Stubs(3)
    stubs.front.send(ClearCache())
    assert all(engine.messages == [ClearCache()] for engine in stubs.engines)
    stubs.engines[1].lora_error = LoRAError("It is broken.")
    stubs.front.send(AddLoRA(1, LoRARequest("style", 3, "/style")))
    assert stubs.received == [LoRAAdded(1, stubs.engines[1].lora_error)]
    stats = stubs.stats()
    assert (stats.steps, stats.held_bytes, stats.scheduler.num_running) == (3, 15, 3)
    assert stats.scheduler.num_blocks == (12,)
    stubs.front.close()


def test_engine_that_does_not_answer_a_ping_is_told_of() -> None:
    stubs = Stubs(2)
    stubs.engines[0].answers_pings = False
    stubs.front.send(Ping(1))
    deadline = time.monotonic() + 5
    while not stubs.received:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (pong,) = stubs.received
    assert isinstance(pong, Pong)
    assert [report.state for report in pong.stats.engines] == [EngineState.SILENT, EngineState.SERVING]
    stubs.front.close()


def test_death_finishes_the_calls_that_wait_for_it() -> None:
    stubs = Stubs(2)
    stubs.engines[0].answers_pings = False
    stubs.front.send(Ping(1))
    stubs.gate.clear()
    stubs.engines[0].die()
    (pong,) = stubs.received
    assert isinstance(pong, Pong)
    assert [report.state for report in pong.stats.engines] == [EngineState.STARTING, EngineState.SERVING]
    stubs.front.close()


def test_unreadable_message_fails_its_requests_and_its_call_alone() -> None:
    stubs = Stubs(2)
    stubs.front.send(Submit((request("1"), request("2"))))
    owner = stubs.owner("1")
    owner.receive(Unread(("1", "unknown")))
    assert stubs.received == [Unread(("1",))]
    stubs.engines[0].answers_pings = stubs.engines[1].answers_pings = False
    stubs.front.send(Ping(5))
    stubs.engines[0].receive(Unread((), 5))
    stubs.engines[1].receive(Unread((), 5))
    assert stubs.received[-1] == Unread((), 5)
    stubs.front.close()


def test_id_used_again_does_not_get_the_aborted_ones_end() -> None:
    stubs = Stubs(2)
    stubs.front.send(Submit((request("1"),)))
    first = stubs.owner("1")
    held = first.receive
    late: list[Reply] = []
    first.receive = late.append
    stubs.front.send(Abort(("1",)))
    stubs.front.send(Submit((request("1"),)))
    first.receive = held
    for reply in late:
        held(reply)
    assert stubs.events("1") == []
    stubs.owner("1").step("1")
    assert [event.token_ids for event in stubs.events("1")] == [(100,)]
    stubs.front.close()


def test_engine_that_does_not_start_is_tried_again() -> None:
    stubs = Stubs(2)
    stubs.failures = 3
    stubs.engines[0].die()
    stubs.settle()
    assert stubs.engines[0].alive
    assert stubs.stats().engines[0].state is EngineState.SERVING
    stubs.front.close()


@pytest.mark.parametrize(
    ("given", "each", "found", "groups"),
    [
        ({}, 1, 2, ["0", "1"]),
        ({}, 2, 4, ["0,1", "2,3"]),
        ({"CUDA_VISIBLE_DEVICES": "5, 3"}, 1, 8, ["5", "3"]),
        ({}, 1, None, ["0", "1"]),
    ],
)
def test_each_engine_sees_its_gpus(given: dict[str, str], each: int, found: int | None, groups: list[str]) -> None:
    made = environments(2, each, DRIVER, given, found)
    assert [variables["CUDA_VISIBLE_DEVICES"] for variables in made] == groups


def test_too_few_gpus_are_refused() -> None:
    with pytest.raises(ConfigError, match="needs 4 GPUs, 2 for each engine, and there are 3"):
        environments(2, 2, DRIVER, {}, 3)
    with pytest.raises(ConfigError, match="there are 1"):
        environments(2, 1, DRIVER, {"CUDA_VISIBLE_DEVICES": "0"}, 8)


def test_engines_on_a_cpu_divide_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    made = environments(2, 1, None, {"HOME": "/"}, None)
    assert made == [{"OMP_NUM_THREADS": "4", "BEHELD_HOST_SHARES": "2", "HOME": "/"}] * 2
    assert environments(2, 1, None, {"OMP_NUM_THREADS": "3"}, None)[0]["OMP_NUM_THREADS"] == "3"


def test_size_is_checked() -> None:
    from beheld.engine.setup import check

    with pytest.raises(ConfigError, match="data_parallel_size must be a whole number from 1"):
        check(EngineArgs(data_parallel_size=0))
