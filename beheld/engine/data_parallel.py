"""Several engines that answer as one: requests are shared out, and an engine that dies is replaced.

What each message does:

| message | engines |
|---|---|
| Submit | each request to one, chosen by the router |
| Abort, Stop | the one that has the request |
| Ping | all; one answer with the sums and a report of each, after a short wait for the slow ones |
| AddLoRA | all, and every engine that starts later; one answer, with the first error |
| ManageLoRA | all; one answer: whether one of them had the adapter, and the adapters of all |
| Sleep, WakeUp | all, and Sleep every engine that starts meanwhile; one answer: all that one of them lacks |
| Profile | all; one answer, with the first error |
| CheckWeights | all; one answer: the weights of all, by the engine's number, with the first error |
| ClearCache | all |
| Close | all |

When an engine dies, its requests of whose answers nobody has seen a part are submitted once more, to another engine:
those without an event so far, and those whose answers are read at their end alone, for which an event with `restarted`
voids the earlier ones. The others fail, because the beginning of an answer that a client has seen cannot be computed
again with certainty. A request that was moved once and loses its engine again fails too: it may be what ends engines.
A new process takes the dead one's place, at growing intervals if it ends again. If no engine is left, all have died.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from beheld.core.errors import BeheldError, StepError
from beheld.core.outputs import TokenEvent
from beheld.core.request import FinishReason, Request
from beheld.core.sleep import MEMORY, EnginePart, PauseMode, lost_at
from beheld.engine.messages import (
    Abort,
    AddLoRA,
    Asleep,
    CheckWeights,
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
    Profile,
    Profiled,
    Reply,
    Sleep,
    Stop,
    Submit,
    Unread,
    WakeUp,
    WeightsChecked,
)
from beheld.engine.routing import Route, Router
from beheld.engine.stats import EngineReport, EngineState, EngineStats, total
from beheld.utils.exit_hook import ExitHook
from beheld.utils.log import get_logger

logger = get_logger(__name__)

# How long a Ping waits for other engines after the first answer.
_PING_S = 0.5
# Seconds before the first attempt to replace an engine that did not live long, and at most.
_RESTART_S = 1.0
_MAX_RESTART_S = 60.0
# An engine that lived so long died of something rare: it is replaced at once.
_LONG_LIFE_S = 60.0


class Restarter(Protocol):
    """Starts engines in place of dead ones."""

    def restart(self, index: int) -> Engine:
        """A new engine with the number of a dead one, not yet started.

        Raises:
            BeheldError: it could not start.
        """

    def cancel(self) -> None:
        """Let running calls of `restart` fail soon, and all later ones at once."""


@dataclass(eq=False)
class _Owned:
    """A request that an engine has.

    Attributes:
        request: None once a part of its answer may have been seen: it cannot move any more. Keeping it takes no memory
            of its own: who collects its answer keeps it, with its media, until the end.
        heard: it had an event.
        moved: another engine died with it.
        aborted: nobody needs it any more, but the engine has not confirmed its end.
    """

    route: Route
    request: Request | None
    heard: bool = False
    moved: bool = False
    aborted: bool = False


@dataclass(eq=False)
class _Member:
    """The state of one engine; `engine` is None while a successor starts."""

    engine: Engine | None
    owned: dict[str, _Owned] = field(default_factory=dict)
    stats: EngineStats | None = None
    silent: bool = False
    restarts: int = 0
    # Deaths one soon after the other.
    short_lives: int = 0
    started: float = field(default_factory=time.monotonic)


@dataclass(eq=False)
class _Call:
    """A message that all engines answer: the places that have not, and the answers."""

    waiting: set[int]
    replies: list[Reply] = field(default_factory=list)
    timer: threading.Timer | None = None


class DataParallelEngines:
    """Several engines behind the interface of one; see messages.Engine for its methods.

    Args:
        engines: not yet started; at least one.
        restarter: replaces those that die.
        router: chooses among as many engines.
    """

    def __init__(self, engines: Sequence[Engine], restarter: Restarter, router: Router) -> None:
        self._members = [_Member(engine) for engine in engines]
        self._restarter = restarter
        self._router = router
        self._receive: Callable[[Reply], None] = lambda reply: None
        self._calls: dict[int, _Call] = {}
        # The adapters that an engine must read when it starts, by number.
        self._loras: dict[int, AddLoRA] = {}
        # What made the others sleep, in order; nothing while all are awake.
        self._asleep: list[Sleep | WakeUp] = []
        self._member_by_id: dict[str, _Member] = {}
        # Reentrant: a message to an engine that cannot be sent is answered in the same thread.
        self._lock = threading.RLock()
        self._closing = threading.Event()
        self._dead = False
        self._threads: list[threading.Thread] = []
        # A script may end without closing its engines. If Ray then ends them, none of them counts as dead.
        self._at_exit = ExitHook(functools.partial(_leave, self._closing, restarter))

    # ------------------------------------------------------------------ the interface of an engine

    def start(self, receive: Callable[[Reply], None]) -> None:
        """Start all engines."""
        self._receive = receive
        for index, member in enumerate(self._members):
            assert member.engine is not None
            self._start(index, member.engine)

    def send(self, message: Message) -> None:
        """Send a message to the engines that it concerns."""
        with self._lock:
            if self._dead or self._closing.is_set():
                return
            if isinstance(message, Submit):
                self._submit(message.requests)
            elif isinstance(message, Abort):
                self._abort(message.request_ids)
            elif isinstance(message, Stop):
                self._stop(message)
            else:
                self._broadcast(message)

    @property
    def alive(self) -> bool:
        """True while one engine lives."""
        return not self._dead and not self._closing.is_set()

    def reports(self) -> tuple[EngineReport, ...]:
        """What each engine does now; its counters are those of its last answer."""
        with self._lock:
            return tuple(self._report(index, member) for index, member in enumerate(self._members))

    def close(self) -> None:
        """End all engines, also those that start."""
        self._at_exit.cancel()
        _leave(self._closing, self._restarter)
        with self._lock:
            engines = [member.engine for member in self._members if member.engine is not None]
            timers = [call.timer for call in self._calls.values() if call.timer is not None]
        for timer in timers:
            timer.cancel()
        # Each may take a second to end, so all end at the same time.
        closers = [threading.Thread(target=engine.close, name="beheld-close") for engine in engines]
        for thread in closers:
            thread.start()
        for thread in (*closers, *self._threads):
            thread.join()

    # ------------------------------------------------------------------ messages

    def _submit(self, requests: Sequence[Request], *, moved: bool = False) -> None:
        by_member: dict[int, list[Request]] = {}
        serving = self._serving()
        begin = time.perf_counter()
        for request in requests:
            former = self._member_by_id.get(request.id)
            allowed = serving
            if former is not None:
                # An aborted request's id is used again. Its last event must not end this one.
                self._end(former, request.id)
                allowed = [index for index in serving if self._members[index] is not former] or serving
            route = self._router.choose(request, allowed)
            member = self._members[route.engine]
            member.owned[request.id] = _Owned(route, request, moved=moved)
            self._member_by_id[request.id] = member
            by_member.setdefault(route.engine, []).append(request)
        self._router.stats.seconds += time.perf_counter() - begin
        for index, chosen in by_member.items():
            self._send_to(index, Submit(tuple(chosen)))

    def _abort(self, request_ids: Sequence[str]) -> None:
        for member in self._members:
            ids = tuple(name for name in request_ids if name in member.owned)
            for name in ids:
                member.owned[name].aborted = True
            if ids and member.engine is not None:
                member.engine.send(Abort(ids))

    def _stop(self, message: Stop) -> None:
        member = self._member_by_id.get(message.request_id)
        if member is None:
            return
        # No event follows.
        self._end(member, message.request_id)
        if member.engine is not None:
            member.engine.send(message)

    def _broadcast(self, message: Message) -> None:
        serving = self._serving()
        if isinstance(message, ClearCache):
            self._router.forget_prefixes()
        elif isinstance(message, AddLoRA):
            self._loras[message.lora.lora_int_id] = message
        elif isinstance(message, ManageLoRA) and message.action is LoRAAction.REMOVE:
            self._loras.pop(message.lora_int_id, None)
        elif isinstance(message, Sleep):
            if lost_at(message.level) & MEMORY:
                self._router.forget_prefixes()
            self._asleep = _after_sleep(self._asleep, message)
        elif isinstance(message, WakeUp):
            if message.again:
                self._router.forget_prefixes()
            self._asleep = _after_waking(self._asleep, message)
        elif isinstance(message, CheckWeights) and message.reset:
            self._router.forget_prefixes()
        if isinstance(message, Ping | AddLoRA | ManageLoRA | Sleep | WakeUp | Profile | CheckWeights):
            self._calls[message.number] = _Call(set(serving))
        for index in serving:
            self._send_to(index, message)

    def _send_to(self, index: int, message: Message) -> None:
        engine = self._members[index].engine
        assert engine is not None
        engine.send(message)

    def _serving(self) -> list[int]:
        return [index for index, member in enumerate(self._members) if member.engine is not None]

    # ------------------------------------------------------------------ replies

    def _take(self, index: int, engine: Engine, reply: Reply) -> None:
        """Called in a thread of the engine's side."""
        with self._lock:
            member = self._members[index]
            replies: list[Reply]
            if member.engine is not engine or self._dead:
                return
            if isinstance(reply, Events):
                replies = self._events(member, reply)
            elif isinstance(reply, Died):
                replies = self._died(index, reply.reason)
            elif isinstance(reply, Unread):
                replies = self._unread(index, member, reply)
            elif isinstance(reply, Pong | LoRAAdded | LoRAsManaged | Asleep | Profiled | WeightsChecked):
                replies = self._answered(index, reply.number, _of_engine(reply, index))
            else:
                raise AssertionError(f"engines do not send {type(reply).__name__} here")
            # Under the lock: what a moved request's new engine says must not overtake what its former one said.
            for each in replies:
                self._receive(each)

    def _events(self, member: _Member, reply: Events) -> list[Reply]:
        """The events of requests that the engine has; what it says of others came too late."""
        kept = []
        for event in reply.events:
            owned = member.owned.get(event.request_id)
            if owned is None:
                continue
            if not owned.heard:
                owned.heard = True
                if owned.request is not None and not owned.request.restartable:
                    owned.request = None
                self._router.computed(owned.route)
            if event.finish is not None:
                self._end(member, event.request_id)
            kept.append(event)
        return [Events(tuple(kept))] if kept else []

    def _end(self, member: _Member, request_id: str) -> None:
        owned = member.owned.pop(request_id, None)
        if owned is not None:
            if self._member_by_id.get(request_id) is member:
                del self._member_by_id[request_id]
            self._router.ended(owned.route, computed=owned.heard)

    def _unread(self, index: int, member: _Member, reply: Unread) -> list[Reply]:
        """A message to or from an engine could not be read: its requests fail, and so does its call."""
        ids = tuple(name for name in reply.request_ids if name in member.owned)
        for name in ids:
            self._end(member, name)
        answered = [] if reply.number is None else self._answered(index, reply.number, reply)
        return [*([Unread(ids)] if ids else []), *answered]

    def _answered(self, index: int, number: int, reply: Reply | None) -> list[Reply]:
        """Add an engine's answer to a call; None if it died. Returns the answer of all, if it was the last."""
        member = self._members[index]
        if isinstance(reply, Pong):
            member.stats, member.silent = reply.stats, False
        call = self._calls.get(number)
        if call is None or index not in call.waiting:
            return []
        call.waiting.discard(index)
        if reply is not None:
            call.replies.append(reply)
        if not call.waiting:
            return self._finish(number)
        if isinstance(reply, Pong) and call.timer is None:
            call.timer = threading.Timer(_PING_S, self._late, (number,))
            call.timer.daemon = True
            call.timer.start()
        return []

    def _late(self, number: int) -> None:
        """Finish a Ping without the engines that have not answered."""
        with self._lock:
            call = self._calls.get(number)
            if call is None or self._dead:
                return
            for index in call.waiting:
                self._members[index].silent = True
            for each in self._finish(number):
                self._receive(each)

    def _finish(self, number: int) -> list[Reply]:
        call = self._calls.pop(number)
        if call.timer is not None:
            call.timer.cancel()
        added = [reply for reply in call.replies if isinstance(reply, LoRAAdded)]
        managed = [reply for reply in call.replies if isinstance(reply, LoRAsManaged)]
        if any(isinstance(reply, Pong) for reply in call.replies):
            return [Pong(number, self._stats())]
        unread = any(isinstance(reply, Unread) for reply in call.replies)
        if unread or not call.replies:
            return [Unread((), number)]
        profiled = [reply for reply in call.replies if isinstance(reply, Profiled)]
        if profiled:
            return [Profiled(number, next((reply.error for reply in profiled if reply.error is not None), None))]
        checked = [reply for reply in call.replies if isinstance(reply, WeightsChecked)]
        if checked:
            digests = {name: digest for reply in checked for name, digest in reply.digests.items()}
            return [WeightsChecked(number, digests, next((each.error for each in checked if each.error), None))]
        asleep = [reply for reply in call.replies if isinstance(reply, Asleep)]
        if asleep:
            lacks = frozenset[EnginePart]().union(*(reply.lacks for reply in asleep))
            if not lacks:
                # What was sent after this message holds still.
                sent = [each.number for each in self._asleep]
                self._asleep = self._asleep[sent.index(number) + 1 :] if number in sent else self._asleep
            return [Asleep(number, lacks, next((reply.error for reply in asleep if reply.error is not None), None))]
        if managed:
            held = {lora for reply in managed for lora in reply.held}
            error = next((reply.error for reply in managed if reply.error is not None), None)
            return [LoRAsManaged(number, any(reply.found for reply in managed), tuple(sorted(held)), error)]
        errors = [reply.error for reply in added if reply.error is not None]
        if errors:
            self._loras = {key: each for key, each in self._loras.items() if each.number != number}
        return [LoRAAdded(number, errors[0] if errors else None)]

    def _stats(self) -> EngineStats:
        reports = tuple(self._report(index, member) for index, member in enumerate(self._members))
        known = [report.stats for report in reports if report.stats is not None]
        return replace(total(known), engines=reports, routing=replace(self._router.stats))

    def _report(self, index: int, member: _Member) -> EngineReport:
        state = EngineState.SILENT if member.silent else EngineState.SERVING
        if member.engine is None:
            state = EngineState.STARTING
        load = self._router.load(index)
        return EngineReport(index, state, member.restarts, len(member.owned), load, member.stats)

    # ------------------------------------------------------------------ death and restart

    def _died(self, index: int, reason: str) -> list[Reply]:
        """Take an engine out, move or fail its requests, and start another; the replies for the front."""
        if self._closing.is_set():
            return []
        member = self._members[index]
        dead, member.engine, member.silent = member.engine, None, False
        owned, member.owned = member.owned, {}
        for name, each in owned.items():
            if self._member_by_id.get(name) is member:
                del self._member_by_id[name]
            self._router.ended(each.route, computed=each.heard)
        self._router.forget(index)
        if not self._serving():
            self._dead = True
            self._restarter.cancel()
            # `close` ends it.
            member.engine = dead
            return [Died(f"{reason}; no other engine is left")]
        aborted = [name for name, each in owned.items() if each.aborted]
        needed = {name: each for name, each in owned.items() if not each.aborted}
        movable = [each.request for each in needed.values() if each.request is not None and not each.moved]
        void = [request.id for request in movable if needed[request.id].heard]
        lost = [name for name, each in needed.items() if each.request is None or each.moved]
        self._router.stats.num_retried += len(movable)
        self._router.stats.num_lost += len(lost)
        logger.error(
            "Engine %d has died (%s). Of its requests, %d move to other engines and %d fail. It is started anew.",
            index,
            reason,
            len(movable),
            len(lost),
        )
        error = StepError(f"Engine {index} has died ({reason}) during this request.", "Send it again.")
        events = [TokenEvent(name, (), restarted=True) for name in void]
        events += [TokenEvent(name, (), FinishReason.ABORT) for name in aborted]
        events += [TokenEvent(name, (), FinishReason.ERROR, error=error) for name in lost]
        replies: list[Reply] = [Events(tuple(events))] if events else []
        for number in list(self._calls):
            replies += self._answered(index, number, None)
        lived_s = time.monotonic() - member.started
        member.short_lives = 0 if lived_s > _LONG_LIFE_S else member.short_lives + 1
        thread = threading.Thread(target=self._replace, args=(index, dead), name="beheld-restart", daemon=True)
        self._threads = [each for each in self._threads if each.is_alive()] + [thread]
        thread.start()
        # What the requests' new engines say must come after the news that their answers begin anew.
        for each_reply in replies:
            self._receive(each_reply)
        self._submit(movable, moved=True)
        return []

    def _replace(self, index: int, dead: Engine | None) -> None:
        """Start an engine in place of a dead one, at growing intervals until one starts."""
        member = self._members[index]
        if dead is not None:
            dead.close()
        wait_s = 0.0 if member.short_lives <= 1 else min(_RESTART_S * 2 ** (member.short_lives - 2), _MAX_RESTART_S)
        while not self._closing.wait(wait_s) and not self._dead:
            try:
                engine = self._restarter.restart(index)
            except (BeheldError, OSError) as error:
                if self._closing.is_set() or self._dead:
                    return
                wait_s = min(max(_RESTART_S, 2 * wait_s), _MAX_RESTART_S)
                logger.error("Engine %d could not start (%s). The next attempt is in %g s.", index, error, wait_s)
                continue
            self._join(index, engine)
            return

    def _join(self, index: int, engine: Engine) -> None:
        """Let a new engine serve."""
        with self._lock:
            member = self._members[index]
            joins = not self._closing.is_set() and not self._dead
            if joins:
                member.engine, member.stats = engine, None
                member.restarts += 1
                member.started = time.monotonic()
                self._start(index, engine)
                for message in (*self._loras.values(), *self._asleep):
                    engine.send(message)
                logger.info("Engine %d serves again.", index)
        if not joins:
            engine.close()

    def _start(self, index: int, engine: Engine) -> None:
        engine.start(lambda reply: self._take(index, engine, reply))


def _of_engine(reply: Reply, index: int) -> Reply:
    """The reply with the number of its engine where it names what the engine has."""
    if not isinstance(reply, WeightsChecked):
        return reply
    digests = {f"dp{index}:{name.partition(':')[2]}": digest for name, digest in reply.digests.items()}
    return replace(reply, digests=digests)


def _after_sleep(sent: list[Sleep | WakeUp], message: Sleep) -> list[Sleep | WakeUp]:
    """Add a message to sleep to those that bring an engine that starts to the state of the others."""
    # It has no request to wait for.
    said = next((each.refuses for each in reversed(sent) if isinstance(each, Sleep)), None)
    order = replace(message, mode=PauseMode.ABORT, refuses=said if message.refuses is None else message.refuses)
    if lost_at(order.level) & MEMORY:
        # It gives back all memory, whatever came back before, and the weights if any of the messages did.
        return [replace(order, level=max([order.level, *(each.level for each in sent if isinstance(each, Sleep))]))]
    if sent and isinstance(sent[-1], Sleep):
        return [*sent[:-1], replace(sent[-1], refuses=order.refuses)]
    return [*sent, order]


def _after_waking(sent: list[Sleep | WakeUp], message: WakeUp) -> list[Sleep | WakeUp]:
    """Add a message to wake up to them."""
    if message.again and not any(isinstance(each, Sleep) and lost_at(each.level) & MEMORY for each in sent):
        # An engine that starts reads the files as they are.
        return sent
    last = sent[-1] if sent else None
    if isinstance(last, WakeUp) and last.again == message.again:
        return [*sent[:-1], replace(message, parts=last.parts | message.parts)]
    return [*sent, message] if sent else []


def _leave(closing: threading.Event, restarter: Restarter) -> None:
    """Let no engine be replaced any more."""
    closing.set()
    restarter.cancel()
