"""The engine's message loop: it takes messages, steps and replies, until it receives Close."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial

from beheld.core.errors import (
    AsleepError,
    BeheldError,
    ConfigError,
    EngineDeadError,
    EngineError,
    ParamsError,
    UserError,
)
from beheld.core.media import MediaItem
from beheld.core.outputs import TokenEvent
from beheld.core.request import FinishReason, LoRARequest, Request
from beheld.core.sleep import MEMORY, PauseMode, lost_at
from beheld.engine.core import EngineCore, InFlight
from beheld.engine.held_tokens import HeldTokens
from beheld.engine.messages import (
    Abort,
    AddLoRA,
    Asleep,
    CheckWeights,
    ClearCache,
    Close,
    Died,
    Events,
    Inbox,
    LoRAAction,
    LoRAAdded,
    LoRAsManaged,
    Lost,
    ManageLoRA,
    Message,
    Ping,
    Pong,
    Prepared,
    Profile,
    Profiled,
    Read,
    Reply,
    Sleep,
    Stop,
    Submit,
    Tokenizer,
    Tried,
    TryItems,
    Unread,
    WakeUp,
    WeightsChecked,
)
from beheld.structured.compile import Compiler
from beheld.structured.rows import GrammarRows
from beheld.utils.allocator import held_bytes
from beheld.utils.log import get_logger

logger = get_logger(__name__)

_THREADS = 2
# A step fails so soon after its executor is lost, unless it stands still.
_FAILS_S = 2.0


def serve(core: EngineCore, inbox: Inbox, reply: Callable[[Reply], None]) -> None:
    """Run `core` until Close arrives, or until a step fails for a reason other than a single sequence.

    Args:
        core: the engine; no one else uses it.
        inbox: its messages.
        reply: sends a reply; called after every step with events.
    """
    in_flight: InFlight | None = None
    held = HeldTokens()
    turn = threading.Lock()

    def say(message: Reply) -> None:
        with turn:
            reply(message)

    death = _Death(core, inbox, say)

    def send(message: Reply) -> None:
        if isinstance(message, Events):
            message = Events(held.take(message.events))
            if not message.events:
                return
        say(message)

    waiting = _WaitingRequests(inbox)
    falling = _FallingAsleep(core, waiting, send)
    core.executor.on_loss(death.expect)
    try:
        while True:
            idle = in_flight is None and not core.has_work and not falling.ready
            message = inbox.wait() if idle else inbox.poll()
            while message is not None:
                if isinstance(message, Close):
                    return
                if isinstance(message, Submit):
                    held.add(message.requests)
                elif isinstance(message, Unread):
                    held.drop(message.request_ids)
                if isinstance(message, Sleep):
                    falling.begin(message)
                else:
                    if isinstance(message, WakeUp):
                        in_flight = falling.carry_out(in_flight)
                        if not message.again:
                            falling.call_off()
                    if _changes_weights(message):
                        send(Events(tuple(core.settle(in_flight))))
                        in_flight = None
                    _handle(core, message, send, waiting)
                message = inbox.poll()
            in_flight = falling.carry_out(in_flight)
            in_flight, events = core.step(in_flight)
            if events:
                send(Events(tuple(events)))
    except Exception as error:
        # The state is unknown now, so no later result is reliable.
        logger.exception("The engine has died.")
        death.tell(error)
    finally:
        death.call_off()
        waiting.close()
        core.flush()


class _Death:
    """Tells once that the engine has died: its loop does, or, where a step stands still, another thread."""

    def __init__(self, core: EngineCore, inbox: Inbox, reply: Callable[[Reply], None]) -> None:
        self._core, self._inbox, self._reply = core, inbox, reply
        self._turn = threading.Lock()
        self._over = False
        self._timer: threading.Timer | None = None

    def expect(self) -> None:
        """Wake the loop, whose executor is lost; if the loop does not come, tell it here. Any thread may call this."""
        with self._turn:
            if self._over:
                return
            self._timer = threading.Timer(_FAILS_S, self._late)
            self._timer.daemon = True
            self._timer.start()
        # Last: the loop may come, and call the timer off, at once.
        self._inbox.put(Lost())

    def _late(self) -> None:
        with self._turn:
            if self._over:
                return
        try:
            self._core.executor.check()
        except EngineDeadError as error:
            logger.error("A step stands still in the engine's own process.")
            self.tell(error)

    def tell(self, error: Exception) -> None:
        """Say why the engine has died, unless that was said."""
        with self._turn:
            if self._over:
                return
            self._over = True
        self._reply(Died(error.reason.rstrip(".") if isinstance(error, EngineDeadError) else type(error).__name__))

    def call_off(self) -> None:
        """Expect nothing any more: the loop has ended."""
        with self._turn:
            self._over = True
        if self._timer is not None:
            self._timer.cancel()


class _WaitingRequests:
    """Requests that wait for a grammar or an adapter. Threads prepare these; no step waits for them."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._requests: dict[str, Request] = {}
        # What became ready while the engine slept.
        self._held: list[Prepared] = []
        self._threads: ThreadPoolExecutor | None = None

    def must_wait(self, core: EngineCore, request: Request) -> bool:
        """True if the request must wait for a grammar or an adapter; Prepared then reports the outcome."""
        grammar, lora, rows = request.grammar, request.lora, core.grammars
        work: list[Callable[[], object]] = []
        if grammar is not None and rows is not None and not rows.compiler.is_cached(grammar):
            work.append(partial(rows.compiler.matcher, grammar))
        if lora is not None and not _in_memory(core, lora):
            work.append(partial(core.executor.read_lora, lora))
        if not work or request.id in self._requests:
            return False
        self._requests[request.id] = request
        self._start(work, partial(Prepared, request.id))
        return True

    def must_read(self, core: EngineCore, message: AddLoRA) -> bool:
        """True if the adapter must be read first; Read then reports the outcome."""
        if _in_memory(core, message.lora):
            return False
        self._start([partial(core.executor.read_lora, message.lora)], partial(Read, message.number, message.lora))
        return True

    def _start(self, work: Sequence[Callable[[], object]], report: Callable[[BeheldError | None], Message]) -> None:
        def carry_out() -> None:
            error: BeheldError | None = None
            try:
                for each in work:
                    each()
            except BeheldError as refusal:
                error = refusal
            except Exception as failure:
                # Without a message the request would wait for ever.
                logger.exception("Preparing a request failed.")
                error = EngineError(f"Preparing the request failed: {type(failure).__name__}.")
            self._inbox.put(report(error))

        if self._threads is None:
            self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="beheld-ahead")
        self._threads.submit(carry_out)

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids of the waiting requests."""
        return tuple(self._requests)

    def pop(self, request_id: str) -> Request | None:
        """Remove and return a waiting request; None if it was aborted or never waited."""
        return self._requests.pop(request_id, None)

    def hold(self, message: Prepared) -> None:
        """Keep a report until the engine has woken up; its request waits on."""
        self._held.append(message)

    def take_held(self) -> list[Prepared]:
        """The reports that were kept."""
        held, self._held = self._held, []
        return held

    def close(self) -> None:
        """Cancel the work that has not started."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)


class _FallingAsleep:
    """The orders to sleep that are not carried out: each waits for the requests that are to end before."""

    def __init__(self, core: EngineCore, waiting: _WaitingRequests, reply: Callable[[Reply], None]) -> None:
        self._core, self._waiting, self._reply = core, waiting, reply
        # The orders, and the ids of the requests that they wait for.
        self._orders: list[tuple[Sleep, frozenset[str]]] = []

    def begin(self, order: Sleep) -> None:
        """Take an order; one that cannot be carried out is refused before any request ends for it."""
        try:
            self._core.check_sleeps(order.level)
        except ConfigError as refusal:
            self._reply(Asleep(order.number, self._core.lacks, refusal))
            return
        if order.refuses is not None:
            self._core.refuses = order.refuses
        awaited = self._known()
        if order.mode is PauseMode.ABORT:
            _handle(self._core, Abort(tuple(awaited)), self._reply, self._waiting)
        self._orders.append((order, awaited if order.mode is PauseMode.WAIT else frozenset()))
        self._note()

    def carry_out(self, in_flight: InFlight | None) -> InFlight | None:
        """Carry out the orders that wait for no request; returns the steps that are in flight still."""
        while self.ready:
            self._reply(Events(tuple(self._core.settle(in_flight))))
            in_flight = None
            self._reply(self._end())
        return in_flight

    def call_off(self) -> None:
        """Drop the orders that wait, as the engine is woken up before it slept; each is answered with an error."""
        orders, self._orders = self._orders, []
        self._note()
        for order, _ in orders:
            error = EngineError("The engine was woken up before its requests had ended.", "Let it sleep again.")
            self._reply(Asleep(order.number, self._core.lacks, error))

    @property
    def ready(self) -> bool:
        """True if the first order can be carried out; a paused engine ends no request."""
        return bool(self._orders) and (bool(self._core.lacks) or not self._orders[0][1] & self._known())

    def _end(self) -> Asleep:
        """Carry out the first order; no step is in flight."""
        order, _ = self._orders.pop(0)
        error: BeheldError | None = None
        try:
            self._core.sleep(order.level)
        except (UserError, EngineError) as refusal:
            if not self._core.alive:
                raise
            error = refusal
        self._note()
        return Asleep(order.number, self._core.lacks, error)

    def _note(self) -> None:
        """Tell the engine whether it refuses requests."""
        self._core.falls_asleep = any(lost_at(each.level) & MEMORY for each, _ in self._orders)

    def _known(self) -> frozenset[str]:
        return frozenset((*self._core.scheduler.all_request_ids(), *self._waiting.ids))


def _handle(core: EngineCore, message: Message, reply: Callable[[Reply], None], waiting: _WaitingRequests) -> None:
    if isinstance(message, Submit):
        try:
            core.check_awake()
        except AsleepError as error:
            reply(Events(tuple(TokenEvent(each.id, (), FinishReason.ERROR, error=error) for each in message.requests)))
            return
        ready = [request for request in message.requests if not waiting.must_wait(core, request)]
        _add_all(core, ready, reply)
    elif isinstance(message, Prepared) and core.lacks & MEMORY:
        waiting.hold(message)
    elif isinstance(message, Prepared):
        request = waiting.pop(message.request_id)
        if request is not None and message.error is not None:
            reply(Events((TokenEvent(request.id, (), FinishReason.ERROR, error=message.error),)))
        elif request is not None:
            _add_all(core, [request], reply)
    elif isinstance(message, Abort):
        ended = []
        for name in message.request_ids:
            waited = waiting.pop(name) is not None
            event = TokenEvent(name, (), FinishReason.ABORT) if waited else core.scheduler.abort(name)
            ended += [] if event is None else [event]
        if ended:
            reply(Events(tuple(ended)))
    elif isinstance(message, Stop):
        core.scheduler.stop(message.request_id)
    elif isinstance(message, Lost):
        core.executor.check()
    elif isinstance(message, Ping):
        core.executor.check()
        reply(Pong(message.number, replace(core.stats(), held_bytes=held_bytes())))
    elif isinstance(message, AddLoRA):
        if not waiting.must_read(core, message):
            reply(LoRAAdded(message.number, _added(core, message.lora)))
    elif isinstance(message, ManageLoRA):
        reply(_managed(core, message))
    elif isinstance(message, WakeUp):
        core.refuses = core.refuses and message.again
        reply(_woken(core, message))
        if not core.lacks & MEMORY:
            for prepared in waiting.take_held():
                _handle(core, prepared, reply, waiting)
    elif isinstance(message, Profile):
        reply(Profiled(message.number, _profiled(core, message.folder)))
    elif isinstance(message, CheckWeights):
        reply(_checked(core, message))
    elif isinstance(message, TryItems):
        reply(Tried(_tried(core, message.items)))
    elif isinstance(message, Read):
        reply(LoRAAdded(message.number, message.error or _added(core, message.lora)))
    elif isinstance(message, Tokenizer):
        compiler = Compiler(lambda: message.text, message.vocab_size, message.eos_ids)
        core.grammars = GrammarRows(compiler)
        # Requests with a grammar report a tokenizer that cannot serve them.
        with suppress(ParamsError):
            compiler.prepare()
    elif isinstance(message, Unread):
        for name in message.request_ids:
            if waiting.pop(name) is None:
                core.scheduler.abort(name)
        reply(message)
    elif isinstance(message, ClearCache):
        core.scheduler.clear_prefix_cache()


def _changes_weights(message: Message) -> bool:
    """True if no step may be in flight meanwhile: it happens between two steps, whether or not it is paused."""
    return (isinstance(message, WakeUp) and message.again) or (isinstance(message, CheckWeights) and message.reset)


def _add_all(core: EngineCore, requests: list[Request], reply: Callable[[Reply], None]) -> None:
    refused = [event for request in requests if (event := _add(core, request)) is not None]
    if refused:
        reply(Events(tuple(refused)))


def _in_memory(core: EngineCore, lora: LoRARequest) -> bool:
    """True if memory holds an adapter of this number, whether or not it is the same adapter."""
    return any(known.lora_int_id == lora.lora_int_id for known in core.executor.loras())


def _added(core: EngineCore, lora: LoRARequest) -> BeheldError | None:
    """Load an adapter into memory; returns the error, if there is one."""
    try:
        core.executor.add_lora(lora)
    except (UserError, EngineError) as error:
        return error
    return None


def _managed(core: EngineCore, message: ManageLoRA) -> LoRAsManaged:
    """Remove or pin an adapter, or find it."""
    executor, number = core.executor, message.lora_int_id
    try:
        if message.action is LoRAAction.REMOVE:
            found = executor.remove_lora(number)
        elif message.action is LoRAAction.PIN:
            found = executor.pin_lora(number)
        else:
            found = any(lora.lora_int_id == number for lora in executor.loras())
        held = tuple(lora.lora_int_id for lora in executor.loras())
    except (UserError, EngineError) as error:
        return LoRAsManaged(message.number, found=False, held=(), error=error)
    return LoRAsManaged(message.number, found, held)


def _woken(core: EngineCore, message: WakeUp) -> Asleep:
    """Bring parts back, or the weights as their files are now."""
    error: BeheldError | None = None
    try:
        if message.again:
            core.reload_weights()
        else:
            core.wake_up(message.parts)
    except (UserError, EngineError) as refusal:
        if not core.alive:
            raise
        error = refusal
    return Asleep(message.number, core.lacks, error)


def _profiled(core: EngineCore, folder: str | None) -> BeheldError | None:
    """Begin or end a record; what was wrong, if anything."""
    try:
        if folder is None:
            core.recorder.start()
        else:
            logger.info("The profile is in %s.", core.recorder.stop(folder))
    except UserError as error:
        return error
    return None


def _checked(core: EngineCore, message: CheckWeights) -> WeightsChecked:
    """Tell what the weights are, or make them zero."""
    try:
        if message.reset:
            core.reset_weights()
            return WeightsChecked(message.number, {})
        return WeightsChecked(message.number, {f"dp0:{name}": found for name, found in core.checksums().items()})
    except (UserError, EngineError) as error:
        if not core.alive:
            raise
        return WeightsChecked(message.number, {}, error)


def _tried(core: EngineCore, items: Sequence[MediaItem]) -> BeheldError | None:
    """Run the towers for items; what was wrong, if anything."""
    try:
        core.executor.try_items(items)
    except (UserError, EngineError) as error:
        return error
    return None


def _add(core: EngineCore, request: Request) -> TokenEvent | None:
    """Queue a request; returns an event with the error if the request can never run."""
    try:
        core.add(request)
    except (UserError, EngineError) as error:
        return TokenEvent(request.id, (), FinishReason.ERROR, error=error)
    return None
