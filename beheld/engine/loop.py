"""The engine's side of the messages: take what has come, step, tell what happened, until told to close."""

from __future__ import annotations

from collections.abc import Callable

from beheld.core.errors import EngineError, UserError
from beheld.core.outputs import TokenEvent
from beheld.core.request import FinishReason, Request
from beheld.engine.core import EngineCore, InFlight
from beheld.engine.messages import (
    Abort,
    ClearCache,
    Close,
    Died,
    Events,
    Inbox,
    Message,
    Ping,
    Pong,
    Reply,
    Stop,
    Submit,
    Tokenizer,
)
from beheld.structured.compile import Compiler
from beheld.structured.rows import GrammarRows
from beheld.utils.log import get_logger

logger = get_logger(__name__)


def serve(core: EngineCore, inbox: Inbox, tell: Callable[[Reply], None]) -> None:
    """Run `core` until Close arrives, or until a step fails in a way that concerns no single sequence.

    Args:
        core: the engine, used by nobody else.
        inbox: its messages.
        tell: takes what is to be said; called after every step with news.
    """
    in_flight: InFlight | None = None
    try:
        while True:
            message = inbox.wait() if in_flight is None and not core.has_work else inbox.poll()
            while message is not None:
                if isinstance(message, Close):
                    return
                _obey(core, message, tell)
                message = inbox.poll()
            in_flight, events = core.step(in_flight)
            if events:
                tell(Events(tuple(events)))
    except Exception as error:
        # Whatever the state is now, no later answer could be trusted.
        logger.exception("The engine has died.")
        tell(Died(type(error).__name__))


def _obey(core: EngineCore, message: Message, tell: Callable[[Reply], None]) -> None:
    if isinstance(message, Submit):
        refused = [event for request in message.requests if (event := _add(core, request)) is not None]
        if refused:
            tell(Events(tuple(refused)))
    elif isinstance(message, Abort):
        ended = [event for name in message.request_ids if (event := core.abort(name)) is not None]
        if ended:
            tell(Events(tuple(ended)))
    elif isinstance(message, Stop):
        core.stop(message.request_id)
    elif isinstance(message, Ping):
        tell(Pong(message.number, core.stats()))
    elif isinstance(message, Tokenizer):
        core.grammars = GrammarRows(Compiler(lambda: message.text, message.vocab_size, message.eos_ids))
    elif isinstance(message, ClearCache):
        core.scheduler.clear_prefix_cache()


def _add(core: EngineCore, request: Request) -> TokenEvent | None:
    """Queue a request; if it can never run, the event that says so."""
    try:
        core.add(request)
    except (UserError, EngineError) as error:
        return TokenEvent(request.id, None, FinishReason.ERROR, error=error)
    return None
