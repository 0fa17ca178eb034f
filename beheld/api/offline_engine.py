"""The engine of an offline run: in this thread, or several engines in processes."""

from __future__ import annotations

import itertools
import queue
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from beheld.core.errors import EngineDeadError, StepError
from beheld.core.outputs import TokenEvent
from beheld.core.request import FinishReason, LoRARequest, Request
from beheld.core.sleep import EnginePart, PauseMode
from beheld.engine.core import EngineCore
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
    Profile,
    Profiled,
    Reply,
    Sleep,
    Stop,
    Submit,
    Unread,
    WakeUp,
)
from beheld.engine.stats import EngineStats

# How long a step waits for events. Ctrl-C is noticed between steps.
_WAIT_S = 0.1


class OfflineEngine(Protocol):
    """An engine as an offline run drives it. `in_flight` is opaque: None if nothing is computed."""

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            UserError, EngineError: it can never run, as far as that is known at once.
        """

    def add_many(self, requests: Sequence[Request]) -> dict[str, Exception]:
        """Queue requests; returns the error of each that can never run, by its id.

        Raises:
            EngineDeadError: the engine accepts no more work.
        """

    def step(self, in_flight: Any) -> tuple[Any, list[TokenEvent]]:
        """Run a step, or wait a moment for events; returns what is in flight now, and the events.

        Raises:
            EngineDeadError: the engine accepts no more work.
        """

    def abort(self, request_id: str) -> None:
        """End a request that nobody needs; no event follows."""

    def stop(self, request_id: str) -> None:
        """End a request whose text is complete; no event follows."""

    @property
    def alive(self) -> bool:
        """False after the engine died."""

    @property
    def has_work(self) -> bool:
        """True while a request waits or runs."""

    @property
    def num_waiting(self) -> int:
        """Requests that wait to be computed; of several engines, for each of them."""

    def num_unseen(self, request: Request) -> int:
        """Tokens of a waiting request that no cached prefix is known to cover."""

    def stats(self) -> EngineStats:
        """Counters since the start."""

    def clear_prefix_cache(self) -> None:
        """Clear the prefix cache."""

    def sleep(self, level: int) -> None:
        """Pause, or give memory back; no request may be left. See EngineCore.sleep.

        Raises:
            ConfigError: the engine cannot.
        """

    def wake_up(self, parts: frozenset[EnginePart]) -> None:
        """Bring parts back.

        Raises:
            ModelError, CapacityError: it sleeps on.
        """

    @property
    def lacks(self) -> frozenset[EnginePart]:
        """What it lacks; nothing, if it is awake."""

    def profile(self, folder: str | None) -> None:
        """Begin to record what is computed; with a folder, end and write the record there.

        Raises:
            ParamsError: it has begun, or it has not.
        """

    def read_lora(self, lora: LoRARequest) -> None:
        """Read an adapter before its request is queued, where that helps."""

    def add_lora(self, lora: LoRARequest) -> None:
        """Load an adapter into memory.

        Raises:
            LoRAError: it cannot be used.
        """

    def remove_lora(self, lora_int_id: int) -> bool:
        """Remove an adapter; False if it is not in memory."""

    def pin_lora(self, lora_int_id: int) -> bool:
        """Keep an adapter in memory until it is removed; False if it is not in memory."""

    def loras(self) -> set[int]:
        """The numbers of the adapters in memory."""

    def close(self) -> None:
        """Free the model's memory."""


class OwnEngine:
    """The engine in the caller's thread; see OfflineEngine."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core

    def add(self, request: Request) -> None:
        """See OfflineEngine."""
        self.core.add(request)

    def add_many(self, requests: Sequence[Request]) -> dict[str, Exception]:
        """See OfflineEngine."""
        return self.core.add_many(requests)

    def step(self, in_flight: Any) -> tuple[Any, list[TokenEvent]]:
        """See OfflineEngine."""
        return self.core.step(in_flight)

    def abort(self, request_id: str) -> None:
        """See OfflineEngine."""
        self.core.scheduler.abort(request_id)

    def stop(self, request_id: str) -> None:
        """See OfflineEngine."""
        self.core.scheduler.stop(request_id)

    @property
    def alive(self) -> bool:
        """See OfflineEngine."""
        return self.core.alive

    @property
    def has_work(self) -> bool:
        """See OfflineEngine."""
        return self.core.scheduler.has_work

    @property
    def num_waiting(self) -> int:
        """See OfflineEngine."""
        return self.core.scheduler.num_waiting

    def num_unseen(self, request: Request) -> int:
        """See OfflineEngine."""
        return self.core.scheduler.num_unseen(request.id)

    def stats(self) -> EngineStats:
        """See OfflineEngine."""
        return self.core.stats()

    def clear_prefix_cache(self) -> None:
        """See OfflineEngine."""
        self.core.scheduler.clear_prefix_cache()

    def sleep(self, level: int) -> None:
        """See OfflineEngine."""
        self.core.sleep(level)

    def wake_up(self, parts: frozenset[EnginePart]) -> None:
        """See OfflineEngine."""
        self.core.wake_up(parts)

    @property
    def lacks(self) -> frozenset[EnginePart]:
        """See OfflineEngine."""
        return self.core.lacks

    def profile(self, folder: str | None) -> None:
        """See OfflineEngine."""
        if folder is None:
            self.core.recorder.start()
        else:
            self.core.recorder.stop(folder)

    def read_lora(self, lora: LoRARequest) -> None:
        """It is read in parallel with the engine's steps; the engine's own reading would delay them."""
        self.core.executor.read_lora(lora)

    def add_lora(self, lora: LoRARequest) -> None:
        """See OfflineEngine."""
        self.core.executor.add_lora(lora)

    def remove_lora(self, lora_int_id: int) -> bool:
        """See OfflineEngine."""
        return self.core.executor.remove_lora(lora_int_id)

    def pin_lora(self, lora_int_id: int) -> bool:
        """See OfflineEngine."""
        return self.core.executor.pin_lora(lora_int_id)

    def loras(self) -> set[int]:
        """See OfflineEngine."""
        return {lora.lora_int_id for lora in self.core.executor.loras()}

    def close(self) -> None:
        """See OfflineEngine."""
        self.core.close()


class RemoteEngines:
    """Several engines in processes; see OfflineEngine. `in_flight` is True while they have requests.

    Args:
        engine: all of them, behind the interface of one; it is started here.
        num_engines: how many they are.
    """

    def __init__(self, engine: Engine, num_engines: int) -> None:
        self._engine = engine
        self._num_engines = num_engines
        self._events: queue.SimpleQueue[Events | Unread] = queue.SimpleQueue()
        self._unfinished: set[str] = set()
        # Those without an event so far.
        self._unheard: set[str] = set()
        self._numbers = itertools.count()
        self._asked: dict[int, queue.SimpleQueue[Reply]] = {}
        self._lacks = frozenset[EnginePart]()
        self._reason = "The engines are closed."
        engine.start(self._receive)

    def add(self, request: Request) -> None:
        """See OfflineEngine."""
        self._check_alive()
        self._unfinished.add(request.id)
        self._unheard.add(request.id)
        self._engine.send(Submit((request,)))

    def add_many(self, requests: Sequence[Request]) -> dict[str, Exception]:
        """See OfflineEngine; what can never run is answered with an event."""
        self._check_alive()
        names = [request.id for request in requests]
        self._unfinished.update(names)
        self._unheard.update(names)
        self._engine.send(Submit(tuple(requests)))
        return {}

    def step(self, in_flight: Any) -> tuple[Any, list[TokenEvent]]:
        """See OfflineEngine."""
        events: list[TokenEvent] = []
        end = time.monotonic() + _WAIT_S
        while self._unfinished and not events and (left_s := end - time.monotonic()) > 0:
            try:
                reply = self._events.get(timeout=left_s)
                while True:
                    events += self._taken(reply)
                    reply = self._events.get_nowait()
            except queue.Empty:
                pass
        if not events:
            self._check_alive()
        return (True if self._unfinished else None), events

    def _taken(self, reply: Events | Unread) -> list[TokenEvent]:
        """The events of requests that have not ended."""
        if isinstance(reply, Unread):
            error = StepError("A message between the engines' processes could not be read.", "Try again.")
            reply = Events(tuple(TokenEvent(name, (), FinishReason.ERROR, error=error) for name in reply.request_ids))
        kept = []
        for event in reply.events:
            if event.request_id not in self._unfinished:
                continue
            self._unheard.discard(event.request_id)
            if event.finish is not None:
                self._unfinished.discard(event.request_id)
            kept.append(event)
        return kept

    def abort(self, request_id: str) -> None:
        """See OfflineEngine."""
        if request_id in self._unfinished:
            self._forget(request_id)
            self._engine.send(Abort((request_id,)))

    def stop(self, request_id: str) -> None:
        """See OfflineEngine."""
        if request_id in self._unfinished:
            self._forget(request_id)
            self._engine.send(Stop(request_id))

    def _forget(self, request_id: str) -> None:
        self._unfinished.discard(request_id)
        self._unheard.discard(request_id)

    @property
    def alive(self) -> bool:
        """See OfflineEngine."""
        return self._engine.alive

    @property
    def has_work(self) -> bool:
        """See OfflineEngine."""
        return bool(self._unfinished)

    @property
    def num_waiting(self) -> int:
        """See OfflineEngine."""
        return len(self._unheard) // self._num_engines

    def num_unseen(self, request: Request) -> int:
        """See OfflineEngine."""
        return len(request.token_ids)

    def stats(self) -> EngineStats:
        """See OfflineEngine."""
        pong = self._ask(Ping)
        assert isinstance(pong, Pong)
        return pong.stats

    def clear_prefix_cache(self) -> None:
        """See OfflineEngine."""
        self._check_alive()
        self._engine.send(ClearCache())

    def sleep(self, level: int) -> None:
        """See OfflineEngine."""
        self._lulled(self._ask(lambda number: Sleep(number, level, PauseMode.WAIT)))

    def wake_up(self, parts: frozenset[EnginePart]) -> None:
        """See OfflineEngine."""
        self._lulled(self._ask(lambda number: WakeUp(number, parts)))

    def _lulled(self, reply: Reply) -> None:
        assert isinstance(reply, Asleep)
        self._lacks = reply.lacks
        if reply.error is not None:
            raise reply.error

    @property
    def lacks(self) -> frozenset[EnginePart]:
        """See OfflineEngine."""
        return self._lacks

    def profile(self, folder: str | None) -> None:
        """See OfflineEngine."""
        reply = self._ask(lambda number: Profile(number, folder))
        if isinstance(reply, Profiled) and reply.error is not None:
            raise reply.error

    def read_lora(self, lora: LoRARequest) -> None:
        """Each engine reads the adapter while its steps run."""

    def add_lora(self, lora: LoRARequest) -> None:
        """See OfflineEngine."""
        added = self._ask(lambda number: AddLoRA(number, lora))
        if isinstance(added, LoRAAdded) and added.error is not None:
            raise added.error

    def remove_lora(self, lora_int_id: int) -> bool:
        """See OfflineEngine."""
        return self._manage(LoRAAction.REMOVE, lora_int_id).found

    def pin_lora(self, lora_int_id: int) -> bool:
        """See OfflineEngine."""
        return self._manage(LoRAAction.PIN, lora_int_id).found

    def loras(self) -> set[int]:
        """See OfflineEngine."""
        return set(self._manage(LoRAAction.LIST, 0).held)

    def close(self) -> None:
        """End the engines."""
        self._engine.close()

    def _manage(self, action: LoRAAction, lora_int_id: int) -> LoRAsManaged:
        reply = self._ask(lambda number: ManageLoRA(number, action, lora_int_id))
        assert isinstance(reply, LoRAsManaged)
        if reply.error is not None:
            raise reply.error
        return reply

    def _ask(self, message: Callable[[int], Message]) -> Reply:
        """Send a message with a new number and wait for its answer.

        Raises:
            StepError: the answer could not be read.
            EngineDeadError: no engine is left.
        """
        number = next(self._numbers)
        answer = self._asked[number] = queue.SimpleQueue()
        try:
            self._engine.send(message(number))
            while True:
                self._check_alive()
                try:
                    reply = answer.get(timeout=_WAIT_S)
                except queue.Empty:
                    continue
                if isinstance(reply, Unread):
                    raise StepError("A message between the engines' processes could not be read.", "Try again.")
                return reply
        finally:
            del self._asked[number]

    def _receive(self, reply: Reply) -> None:
        """Called in threads of the engines' side."""
        if isinstance(reply, Died):
            self._reason = f"The engines have died ({reply.reason})."
        elif isinstance(reply, Events) or (isinstance(reply, Unread) and reply.number is None):
            self._events.put(reply)
        elif isinstance(reply, Pong | LoRAAdded | LoRAsManaged | Asleep | Profiled | Unread):
            answer = None if reply.number is None else self._asked.get(reply.number)
            if answer is not None:
                answer.put(reply)

    def _check_alive(self) -> None:
        if not self._engine.alive:
            raise EngineDeadError(self._reason, "Start them again.")
