"""An engine behind a connection: threads carry messages there and replies back."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import ClassVar

from beheld.core.errors import BeheldError, StepError
from beheld.core.outputs import TokenEvent
from beheld.core.request import FinishReason
from beheld.engine.crossing import received_reply, sent_message, unread_frame
from beheld.engine.label import label_of, unread_of
from beheld.engine.messages import Abort, Close, Died, Events, Message, Reply, Submit, Unread
from beheld.utils.log import get_logger
from beheld.wire.link import FrameError, Link, NoRoomError
from beheld.wire.stream_link import StreamLink

logger = get_logger(__name__)


class LinkedEngine:
    """What engines behind a connection share; see messages.Engine for the meaning of the methods.

    Args:
        link: the connection.
    """

    _end_of_link: ClassVar[str]

    def __init__(self, link: Link | StreamLink) -> None:
        self._link = link
        self._outbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._receive: Callable[[Reply], None] = lambda reply: None
        self._threads: list[threading.Thread] = []
        self._alive = True

    def start(self, receive: Callable[[Reply], None]) -> None:
        """Start; a thread calls `receive`."""
        assert not self._threads, "an engine starts once"
        self._receive = receive
        for work in (self._listen, self._send_all):
            thread = threading.Thread(target=work, name="beheld-engine-link", daemon=True)
            thread.start()
            self._threads.append(thread)

    def send(self, message: Message) -> None:
        """Send a message; another thread serializes it."""
        self._outbox.put(message)

    @property
    def alive(self) -> bool:
        """False after the engine died or was closed."""
        return self._alive

    def _leave(self, timeout_s: float) -> None:
        """Send that this side closes, and wait for that at most so long."""
        self._alive = False
        self.send(Close())
        self._outbox.put(None)
        if self._threads:
            self._threads[1].join(timeout_s)

    def _before(self, message: Message) -> None:
        """Send what must arrive before a message."""

    def _seen(self, reply: Reply) -> None:
        """Note what a reply says, before it is passed on."""

    def _listen(self) -> None:
        while True:
            try:
                reply = received_reply(self._link.receive(), self._link)
            except FrameError as error:
                unread = unread_frame(error)
                if unread is None:
                    continue
                reply = unread
            except EOFError:
                if self._alive:
                    self._alive = False
                    self._receive(Died(self._end_of_link))
                return
            if isinstance(reply, Unread) and reply.request_ids:
                # Their lost events cannot be recovered, so abort them.
                self.send(Abort(reply.request_ids))
            if isinstance(reply, Died):
                self._alive = False
            self._seen(reply)
            self._receive(reply)

    def _send_all(self) -> None:
        while (message := self._outbox.get()) is not None:
            try:
                self._before(message)
                self._link.send(sent_message(message), label=label_of(message))
            except BeheldError as error:
                assert isinstance(message, Submit)
                ends = [TokenEvent(r.id, (), FinishReason.ERROR, error=error) for r in message.requests]
                self._receive(Events(tuple(ends)))
            except NoRoomError as error:
                self._not_sent(message, error)
            except OSError:
                return

    def _not_sent(self, message: Message, error: NoRoomError) -> None:
        """The system has no room for a large message: its requests, or its call, fail."""
        lost = unread_of(label_of(message))
        logger.error("There is no room for a message about %d requests (%s).", len(lost.request_ids), error.strerror)
        if not isinstance(message, Submit):
            self._receive(lost)
            return
        refusal = StepError("The server has no descriptors or no memory left for this request.", "Try again.")
        ends = [TokenEvent(r.id, (), FinishReason.ERROR, error=refusal) for r in message.requests]
        self._receive(Events(tuple(ends)))
