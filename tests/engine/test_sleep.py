"""The engine's loop falls asleep in each mode and wakes up: on a device that forgot all, answers are as expected."""

from __future__ import annotations

import dataclasses
import itertools
import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from beheld.core.config import KVGroup
from beheld.core.errors import AsleepError, CapacityError, ConfigError
from beheld.core.outputs import TokenEvent
from beheld.core.plan import StepPlan
from beheld.core.request import FinishReason, LoRARequest, Request
from beheld.core.sleep import EnginePart, PauseMode, level_of, mode_of, parts_of
from beheld.engine import loop as loop_of_engine
from beheld.engine.core import EngineCore
from beheld.engine.messages import (
    Abort,
    Asleep,
    CheckWeights,
    Close,
    Events,
    Message,
    Ping,
    Pong,
    Reply,
    Sleep,
    Submit,
    WakeUp,
    WeightsChecked,
)
from beheld.engine.thread import EngineThread
from tests import fakes
from tests.fakes import FakeExecutor, expected_tokens, fake_capacity, fake_config, fake_info, fake_item, fake_request

ALL = frozenset(EnginePart)
GROUPS = [(fakes.FULL,), (fakes.FULL, fakes.sliding(8)), (fakes.recurrent(8),), (fakes.FULL, fakes.CROSS)]


class Loop:
    """A loop in a thread, over a device of integers."""

    def __init__(self, *groups: KVGroup, overlap: bool = False, **changes: Any) -> None:
        info, config = fake_info(*groups), fake_config(overlap=overlap, **changes)
        self.executor = FakeExecutor(config, info, fake_capacity(info, config))
        self.core = EngineCore(info, self.executor)
        self.replies: queue.SimpleQueue[Reply] = queue.SimpleQueue()
        self.thread = EngineThread(self.core)
        self.thread.start(self.replies.put)
        self.events: dict[str, list[TokenEvent]] = {}
        self.longest = config.max_model_len

    def until(self, kind: type[Any]) -> Any:
        """The next reply of this kind; events before it are noted."""
        while True:
            reply = self.replies.get(timeout=10)
            if isinstance(reply, Events):
                for event in reply.events:
                    self.events.setdefault(event.request_id, []).append(event)
            if isinstance(reply, kind):
                return reply

    def ended(self, name: str) -> TokenEvent:
        """The last event of a request."""
        while not self.events.get(name) or self.events[name][-1].finish is None:
            self.until(Events)
        return self.events[name][-1]

    def tokens(self, name: str) -> list[int]:
        return [token for event in self.events.get(name, []) for token in event.token_ids]

    def right(self, request: Request) -> None:
        """Assert that a request has the answer that it must have."""
        self.ended(request.id)
        assert self.tokens(request.id) == expected_tokens(request, self.longest)[0]

    def send_at(self, step: int, message: Message) -> None:
        """Send a message while the engine launches this step, counted from now."""
        launch, count = self.executor.launch, itertools.count()

        def launched(plan: StepPlan) -> StepPlan:
            if next(count) == step:
                self.thread.send(message)
            return launch(plan)

        self.executor.launch = launched  # type: ignore[method-assign]

    def sleep(self, level: int, mode: PauseMode = PauseMode.ABORT) -> Asleep:
        self.thread.send(Sleep(level, level, mode))
        found: Asleep = self.until(Asleep)
        return found

    def wake_up(self, *parts: EnginePart) -> Asleep:
        self.thread.send(WakeUp(9, frozenset(parts) or ALL))
        found: Asleep = self.until(Asleep)
        return found


@pytest.fixture(params=[False, True], ids=["in turn", "overlap"])
def loop(request: pytest.FixtureRequest) -> Iterator[Loop]:
    made = Loop(fakes.FULL, overlap=request.param)
    yield made
    made.thread.close()


def asked(name: str, length: int = 21, tokens: int = 40) -> Request:
    return fake_request(name, range(3, 3 + length), fake_item("cat", 6), max_tokens=tokens)


@pytest.mark.parametrize("groups", GROUPS, ids=lambda groups: "+".join(group.kind for group in groups))
@pytest.mark.parametrize("level", [0, 1, 2])
def test_kept_requests_go_on_as_if_nothing_were(groups: tuple[KVGroup, ...], level: int) -> None:
    for overlap in (False, True):
        loop = Loop(*groups, overlap=overlap)
        requests = [fake_request(str(k), range(3, 20 + 7 * k), max_tokens=60) for k in range(5)]
        # All five run by then, and none has ended: a slow test would find fewer.
        loop.send_at(12, Sleep(level, level, PauseMode.KEEP))
        loop.thread.send(Submit(tuple(requests)))
        lacks = loop.until(Asleep).lacks
        assert lacks == (ALL if level else {EnginePart.SCHEDULING})
        assert not loop.core.has_work
        assert loop.core.scheduler.num_running == (5 if level == 0 else 0)
        loop.core.scheduler.check()
        steps = loop.core.stats().steps
        loop.thread.send(Ping(1))
        loop.until(Pong)
        assert loop.core.stats().steps == steps
        assert loop.wake_up().lacks == frozenset()
        for request in requests:
            loop.right(request)
        loop.core.scheduler.check()
        loop.thread.close()


def test_the_device_has_nothing_of_before(loop: Loop) -> None:
    first, second = asked("a"), asked("b")
    loop.thread.send(Submit((first,)))
    loop.right(first)
    assert loop.core.stats().scheduler.num_cached_blocks[0] > 0
    assert loop.executor.num_encoded == 1
    loop.sleep(1)
    stats = loop.core.stats().scheduler
    assert (stats.num_cached_blocks, stats.num_embeds) == ((0,), 0)
    loop.wake_up()
    loop.thread.send(Submit((second,)))
    loop.right(second)
    assert loop.executor.num_encoded == 2, "its picture is encoded again"
    assert loop.events["b"][0].num_cached == 0


RELOAD = WakeUp(8, frozenset({EnginePart.WEIGHTS}), again=True)


@pytest.mark.parametrize("groups", GROUPS, ids=lambda groups: "+".join(group.kind for group in groups))
@pytest.mark.parametrize("overlap", [False, True])
def test_requests_go_on_after_the_weights_were_read_again(groups: tuple[KVGroup, ...], overlap: bool) -> None:
    loop = Loop(*groups, overlap=overlap)
    requests = [fake_request(str(k), range(3, 20 + 7 * k), max_tokens=60) for k in range(5)]
    loop.send_at(12, RELOAD)
    loop.thread.send(Submit(tuple(requests)))
    assert loop.until(Asleep) == Asleep(8, frozenset())
    for request in requests:
        loop.right(request)
    loop.core.scheduler.check()
    loop.thread.close()


def test_a_paused_engine_computes_nothing_when_the_weights_are_read_again(loop: Loop) -> None:
    request = asked("a")
    loop.send_at(3, Sleep(0, 0, PauseMode.KEEP))
    loop.thread.send(Submit((request,)))
    loop.until(Asleep)
    steps = loop.core.stats().steps
    loop.thread.send(RELOAD)
    assert loop.until(Asleep).lacks == {EnginePart.SCHEDULING}
    loop.thread.send(Ping(1))
    loop.until(Pong)
    assert loop.core.stats().steps == steps
    loop.wake_up(EnginePart.SCHEDULING)
    loop.right(request)


@pytest.mark.parametrize("back", [(), (EnginePart.WEIGHTS,), (EnginePart.KV_CACHE,)])
def test_weights_that_are_read_again_bring_no_other_memory(loop: Loop, back: tuple[EnginePart, ...]) -> None:
    taken: list[set[EnginePart]] = []
    loop.executor.wake_up = lambda parts: taken.append(set(parts))  # type: ignore[method-assign]
    loop.sleep(2)
    for part in back:
        loop.wake_up(part)
    loop.thread.send(RELOAD)
    lacks = loop.until(Asleep).lacks
    assert taken[-1] == {*back, EnginePart.WEIGHTS}
    assert lacks == (frozenset() if EnginePart.KV_CACHE in back else {EnginePart.KV_CACHE, EnginePart.SCHEDULING})
    assert loop.wake_up(EnginePart.KV_CACHE).lacks == frozenset()
    request = asked("a")
    loop.thread.send(Submit((request,)))
    loop.right(request)


def test_it_sleeps_where_the_weights_cannot_be_read_again(loop: Loop) -> None:
    def refused(parts: object) -> None:
        raise CapacityError("Others have the memory.")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.executor, "wake_up", refused)
        loop.thread.send(RELOAD)
        told = loop.until(Asleep)
    assert (told.lacks, type(told.error)) == (ALL, CapacityError)
    assert loop.wake_up().lacks == frozenset()


def test_a_reload_calls_off_no_sleep_that_waits(loop: Loop) -> None:
    request = asked("a")
    loop.send_at(3, RELOAD)
    loop.send_at(2, Sleep(1, 1, PauseMode.WAIT))
    loop.thread.send(Submit((request,)))
    assert loop.until(Asleep) == Asleep(8, frozenset())
    assert loop.until(Asleep) == Asleep(1, ALL)
    loop.right(request)


@pytest.mark.parametrize("groups", [(fakes.FULL,), (fakes.FULL, fakes.CROSS)], ids=["embeddings", "states"])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("step", [0, 1, 2, 8])
def test_weights_that_were_reset_leave_no_picture(groups: tuple[KVGroup, ...], overlap: bool, step: int) -> None:
    loop = Loop(*groups, overlap=overlap, max_num_batched_tokens=8)
    first, second = asked("a"), asked("b")
    loop.send_at(step, CheckWeights(1, reset=True))
    loop.thread.send(Submit((first,)))
    assert loop.until(WeightsChecked).error is None
    loop.core.scheduler.check()
    loop.right(first)
    loop.thread.send(CheckWeights(2, reset=True))
    loop.until(WeightsChecked)
    assert loop.core.stats().scheduler.num_embeds == 0
    before = loop.executor.num_encoded
    loop.thread.send(Submit((second,)))
    loop.right(second)
    assert loop.executor.num_encoded == before + 1, "its picture is encoded again"
    loop.core.scheduler.check()
    loop.thread.close()


def test_abort_ends_what_runs_and_what_waits(loop: Loop) -> None:
    requests = [asked(str(k), tokens=150) for k in range(12)]
    loop.thread.send(Submit(tuple(requests)))
    while not loop.tokens("0"):
        loop.until(Events)
    loop.sleep(2)
    for request in requests:
        assert loop.ended(request.id).finish is FinishReason.ABORT
        found = loop.tokens(request.id)
        assert found == expected_tokens(request, loop.longest)[0][: len(found)]


def test_wait_lets_requests_end_first_and_refuses_new_ones(loop: Loop) -> None:
    requests = [asked(str(k)) for k in range(12)]
    late = asked("late")
    loop.thread.send(Submit(tuple(requests)))
    loop.thread.send(Sleep(1, 1, PauseMode.WAIT))
    loop.thread.send(Submit((late,)))
    assert loop.until(Asleep).lacks == ALL
    for request in requests:
        loop.right(request)
    assert isinstance(loop.ended("late").error, AsleepError)
    loop.wake_up()
    loop.thread.send(Submit((asked("later"),)))
    loop.right(asked("later"))


def test_a_paused_engine_takes_requests_and_answers_them_afterwards(loop: Loop) -> None:
    loop.sleep(0)
    request = asked("a")
    loop.thread.send(Submit((request, asked("b"))))
    loop.thread.send(Abort(("b",)))
    assert loop.ended("b").finish is FinishReason.ABORT
    assert not loop.tokens("a")
    assert loop.wake_up(EnginePart.SCHEDULING).lacks == frozenset()
    loop.right(request)


def test_all_that_it_lacks_must_come_back(loop: Loop) -> None:
    loop.sleep(2)
    loop.thread.send(Submit((asked("a"),)))
    assert isinstance(loop.ended("a").error, AsleepError)
    assert loop.wake_up(EnginePart.WEIGHTS).lacks == {EnginePart.KV_CACHE, EnginePart.SCHEDULING}
    assert loop.wake_up(EnginePart.SCHEDULING).lacks == {EnginePart.KV_CACHE, EnginePart.SCHEDULING}
    assert loop.sleep(0).lacks == {EnginePart.KV_CACHE, EnginePart.SCHEDULING}
    assert loop.wake_up(EnginePart.KV_CACHE).lacks == frozenset()
    assert loop.wake_up().lacks == frozenset()
    loop.thread.send(Submit((asked("b"),)))
    loop.right(asked("b"))


def test_what_cannot_sleep_goes_on_and_what_cannot_wake_up_sleeps_on(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(error: Exception) -> Any:
        def call(*_: Any) -> None:
            raise error

        return call

    with monkeypatch.context() as patch:
        patch.setattr(loop.executor, "check_sleeps", refused(ConfigError("Ranks do not sleep.")))
        loop.thread.send(Submit((asked("a"),)))
        answers = [loop.sleep(1), loop.sleep(2, PauseMode.WAIT)]
        loop.thread.send(Submit((asked("late"),)))
        for answer in answers:
            assert (answer.lacks, str(answer.error)) == (frozenset(), "Ranks do not sleep.")
        assert loop.sleep(0, PauseMode.KEEP).lacks == {EnginePart.SCHEDULING}
    loop.wake_up()
    # No request ended for an order that could not be carried out, and none was refused.
    loop.right(asked("a"))
    loop.right(asked("late"))
    loop.sleep(1)
    with monkeypatch.context() as patch:
        patch.setattr(loop.executor, "wake_up", refused(CapacityError("Others have the memory.")))
        answer = loop.wake_up()
        assert (answer.lacks, str(answer.error)) == (ALL, "Others have the memory.")
    loop.wake_up()
    loop.thread.send(Submit((asked("b"),)))
    loop.right(asked("b"))


class Given:
    """An inbox whose messages are all there."""

    def __init__(self, *messages: Message) -> None:
        self._messages = [*messages, Close()]

    def put(self, message: Message) -> None:
        raise AssertionError("nothing else comes")

    def wait(self) -> Message:
        return self._messages.pop(0)

    def poll(self) -> Message | None:
        return self._messages.pop(0) if self._messages else None


def served(core: EngineCore, *messages: Message) -> list[Reply]:
    replies: list[Reply] = []
    loop_of_engine.serve(core, Given(*messages), replies.append)
    return replies


def new_core() -> EngineCore:
    info, config = fake_info(fakes.FULL), fake_config()
    return EngineCore(info, FakeExecutor(config, info, fake_capacity(info, config)))


def test_orders_that_come_together_are_carried_out_in_their_order() -> None:
    core = new_core()
    replies = served(core, Sleep(1, 2, PauseMode.ABORT), WakeUp(2, frozenset({EnginePart.WEIGHTS})))
    assert replies == [Asleep(1, ALL), Asleep(2, ALL - {EnginePart.WEIGHTS})]
    core = new_core()
    replies = served(core, Sleep(1, 2, PauseMode.ABORT), WakeUp(2, ALL), Sleep(3, 0, PauseMode.KEEP), WakeUp(4, ALL))
    assert [reply.lacks for reply in replies if isinstance(reply, Asleep)] == [ALL, set(), {"scheduling"}, set()]
    assert core.lacks == frozenset()


def test_waking_up_calls_off_an_order_that_waits(loop: Loop) -> None:
    request, late = asked("a", tokens=100), asked("late")
    loop.send_at(3, Sleep(1, 2, PauseMode.WAIT))
    loop.send_at(4, WakeUp(2, ALL))
    loop.send_at(5, Submit((late,)))
    loop.thread.send(Submit((request,)))
    called_off, woken = loop.until(Asleep), loop.until(Asleep)
    assert (called_off.number, called_off.lacks, woken) == (1, frozenset(), Asleep(2, frozenset()))
    assert "woken up before" in str(called_off.error)
    loop.right(request)
    loop.right(late)
    assert loop.core.lacks == frozenset()


@pytest.mark.parametrize("mode", [PauseMode.WAIT, PauseMode.KEEP])
def test_requests_whose_adapter_is_being_read_are_not_refused(monkeypatch: pytest.MonkeyPatch, mode: PauseMode) -> None:
    loop = Loop(fakes.FULL, max_loras=2, max_cpu_loras=2)
    begun, let = threading.Event(), threading.Event()

    def read(lora: LoRARequest) -> None:
        begun.set()
        assert let.wait(10)

    monkeypatch.setattr(loop.executor, "read_lora", read)
    request = dataclasses.replace(asked("a"), lora=LoRARequest("other", 7, "/nowhere"))
    loop.thread.send(Submit((request,)))
    assert begun.wait(10)
    loop.thread.send(Sleep(1, 2, mode))
    if mode is PauseMode.KEEP:
        assert loop.until(Asleep).lacks == ALL
    let.set()
    if mode is PauseMode.WAIT:
        assert loop.until(Asleep).lacks == ALL
    else:
        loop.thread.send(Ping(3))
        loop.until(Pong)
        assert not loop.events
        loop.wake_up()
    assert loop.ended("a").error is None
    loop.right(request)
    loop.thread.close()


def test_sleeping_again_gives_back_what_has_come_back(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    levels: list[int] = []
    monkeypatch.setattr(loop.executor, "sleep", levels.append)
    loop.sleep(1)
    loop.sleep(2)
    loop.wake_up(EnginePart.WEIGHTS)
    assert loop.sleep(2).lacks == ALL
    assert levels == [1, 2, 2]


def test_an_interrupted_engine_knows_that_it_may_lack_all(monkeypatch: pytest.MonkeyPatch) -> None:
    core = new_core()

    def interrupted(level: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(core.executor, "sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        core.sleep(2)
    assert core.lacks == ALL
    core.wake_up(ALL)
    assert core.lacks == frozenset()


def test_words_for_levels_modes_and_parts() -> None:
    assert [level_of(level) for level in (0, 1, 2)] == [0, 1, 2]
    assert mode_of("keep") is PauseMode.KEEP
    assert parts_of(None) == ALL
    assert parts_of("weights") == {EnginePart.WEIGHTS} == parts_of(["weights"])
