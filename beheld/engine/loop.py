"""The engine's side of the messages: take what has come, step, tell what happened, until told to close."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from beheld.core.errors import BeheldError, EngineDeadError, EngineError, UserError
from beheld.core.media import MediaItem
from beheld.core.outputs import TokenEvent
from beheld.core.request import FinishReason, LoRARequest, Request
from beheld.engine.core import EngineCore, InFlight
from beheld.engine.messages import (
    Abort,
    AddLoRA,
    ClearCache,
    Close,
    Died,
    Events,
    Inbox,
    LoRAAdded,
    Message,
    Ping,
    Pong,
    Prepared,
    Read,
    Reply,
    Stop,
    Submit,
    Tokenizer,
    Tried,
    TryItems,
    Unread,
)
from beheld.structured.compile import Compiler
from beheld.structured.rows import GrammarRows
from beheld.utils.allocator import held_bytes
from beheld.utils.log import get_logger

logger = get_logger(__name__)

_THREADS = 2


def serve(core: EngineCore, inbox: Inbox, tell: Callable[[Reply], None]) -> None:
    """Run `core` until Close arrives, or until a step fails in a way that concerns no single sequence.

    Args:
        core: the engine, used by nobody else.
        inbox: its messages.
        tell: takes what is to be said; called after every step with news.
    """
    in_flight: InFlight | None = None
    waiting = _Waiting(inbox)
    try:
        while True:
            message = inbox.wait() if in_flight is None and not core.scheduler.has_work else inbox.poll()
            while message is not None:
                if isinstance(message, Close):
                    return
                _obey(core, message, tell, waiting)
                message = inbox.poll()
            in_flight, events = core.step(in_flight)
            if events:
                tell(Events(tuple(events)))
    except Exception as error:
        # Whatever the state is now, no later answer could be trusted.
        logger.exception("The engine has died.")
        tell(Died(error.reason.rstrip(".") if isinstance(error, EngineDeadError) else type(error).__name__))
    finally:
        waiting.close()


class _Waiting:
    """Requests whose grammars are being compiled or adapters read, in threads: no step waits for that."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._requests: dict[str, Request] = {}
        self._threads: ThreadPoolExecutor | None = None

    def takes(self, core: EngineCore, request: Request) -> bool:
        """True if something that the request needs is not there yet; Prepared will say when it is."""
        grammar, lora, rows = request.grammar, request.lora, core.grammars
        work: list[Callable[[], object]] = []
        if grammar is not None and rows is not None and not rows.compiler.holds(grammar):
            work.append(partial(rows.compiler.matcher, grammar))
        if lora is not None and not _holds(core, lora):
            work.append(partial(core.executor.read_lora, lora))
        if not work or request.id in self._requests:
            return False
        self._requests[request.id] = request
        self._start(work, partial(Prepared, request.id))
        return True

    def reads(self, core: EngineCore, message: AddLoRA) -> bool:
        """True if the adapter is not there yet; Read will say when it is."""
        if _holds(core, message.lora):
            return False
        self._start([partial(core.executor.read_lora, message.lora)], partial(Read, message.number, message.lora))
        return True

    def _start(self, work: Sequence[Callable[[], object]], told: Callable[[BeheldError | None], Message]) -> None:
        def carry_out() -> None:
            error: BeheldError | None = None
            try:
                for each in work:
                    each()
            except BeheldError as refusal:
                error = refusal
            except Exception as failure:
                # Nobody else would hear of it, and the request would wait for ever.
                logger.exception("Preparing a request failed.")
                error = EngineError(f"Preparing the request failed: {type(failure).__name__}.")
            self._inbox.put(told(error))

        if self._threads is None:
            self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="beheld-ahead")
        self._threads.submit(carry_out)

    def pop(self, request_id: str) -> Request | None:
        """The request, which waits no longer; None if it was aborted, or never waited."""
        return self._requests.pop(request_id, None)

    def close(self) -> None:
        """What is being done is of no use any more."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)


def _obey(core: EngineCore, message: Message, tell: Callable[[Reply], None], waiting: _Waiting) -> None:
    if isinstance(message, Submit):
        ready = [request for request in message.requests if not waiting.takes(core, request)]
        _add_all(core, ready, tell)
    elif isinstance(message, Prepared):
        request = waiting.pop(message.request_id)
        if request is not None and message.error is not None:
            tell(Events((TokenEvent(request.id, (), FinishReason.ERROR, error=message.error),)))
        elif request is not None:
            _add_all(core, [request], tell)
    elif isinstance(message, Abort):
        ended = []
        for name in message.request_ids:
            waited = waiting.pop(name) is not None
            event = TokenEvent(name, (), FinishReason.ABORT) if waited else core.scheduler.abort(name)
            ended += [] if event is None else [event]
        if ended:
            tell(Events(tuple(ended)))
    elif isinstance(message, Stop):
        core.scheduler.stop(message.request_id)
    elif isinstance(message, Ping):
        tell(Pong(message.number, replace(core.stats(), held_bytes=held_bytes())))
    elif isinstance(message, AddLoRA):
        if not waiting.reads(core, message):
            tell(LoRAAdded(message.number, _added(core, message.lora)))
    elif isinstance(message, TryItems):
        tell(Tried(_tried(core, message.items)))
    elif isinstance(message, Read):
        tell(LoRAAdded(message.number, message.error or _added(core, message.lora)))
    elif isinstance(message, Tokenizer):
        core.grammars = GrammarRows(Compiler(lambda: message.text, message.vocab_size, message.eos_ids))
    elif isinstance(message, Unread):
        for name in message.request_ids:
            if waiting.pop(name) is None:
                core.scheduler.abort(name)
        tell(message)
    elif isinstance(message, ClearCache):
        core.scheduler.clear_prefix_cache()


def _add_all(core: EngineCore, requests: list[Request], tell: Callable[[Reply], None]) -> None:
    refused = [event for request in requests if (event := _add(core, request)) is not None]
    if refused:
        tell(Events(tuple(refused)))


def _holds(core: EngineCore, lora: LoRARequest) -> bool:
    """True if an adapter of this number is in memory, be it this one or not."""
    return any(known.lora_int_id == lora.lora_int_id for known in core.executor.loras())


def _added(core: EngineCore, lora: LoRARequest) -> BeheldError | None:
    """Take an adapter into memory; what is wrong with it, if anything."""
    try:
        core.executor.add_lora(lora)
    except (UserError, EngineError) as error:
        return error
    return None


def _tried(core: EngineCore, items: Sequence[MediaItem]) -> BeheldError | None:
    """Run the towers for items; what was wrong, if anything."""
    try:
        core.executor.try_items(items)
    except (UserError, EngineError) as error:
        return error
    return None


def _add(core: EngineCore, request: Request) -> TokenEvent | None:
    """Queue a request; if it can never run, the event that says so."""
    try:
        core.add(request)
    except (UserError, EngineError) as error:
        return TokenEvent(request.id, (), FinishReason.ERROR, error=error)
    return None
