"""The engine in a thread of the caller's process."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from beheld.engine.core import EngineCore
from beheld.engine.loop import serve
from beheld.engine.messages import Close, Died, Message, Reply
from beheld.engine.stats import EngineReport
from beheld.utils.roomy_stack import roomy

# A step that stands still does not end, and its thread is left.
_CLOSE_S, _LOOK_S = 2.0, 0.25


class _QueueInbox:
    """A message queue within the process."""

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[Message] = queue.SimpleQueue()

    def wait(self) -> Message:
        return self.queue.get()

    def poll(self) -> Message | None:
        try:
            return self.queue.get_nowait()
        except queue.Empty:
            return None

    def put(self, message: Message) -> None:
        self.queue.put(message)


class EngineThread:
    """Runs a core in a thread; see messages.Engine for its methods.

    Work on the device leaves the interpreter lock to other threads, so one process suffices for small loads. With many
    streaming clients the lock becomes the bottleneck, and engine/process.py is the better choice.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._inbox = _QueueInbox()
        self._thread: threading.Thread | None = None
        self._ended = False

    def start(self, receive: Callable[[Reply], None]) -> None:
        """Start; the engine's thread calls `receive`."""
        assert self._thread is None, "an engine starts once"

        @roomy
        def run() -> None:
            serve(self._core, self._inbox, send_reply)
            self._ended = True

        def send_reply(reply: Reply) -> None:
            self._ended = self._ended or isinstance(reply, Died)
            receive(reply)

        self._thread = threading.Thread(target=run, name="beheld-engine", daemon=True)
        self._thread.start()

    def send(self, message: Message) -> None:
        """Send a message."""
        self._inbox.queue.put(message)

    @property
    def alive(self) -> bool:
        """False after the engine died or was closed."""
        return self._thread is not None and not self._ended

    def reports(self) -> tuple[EngineReport, ...]:
        """It is one engine: nothing."""
        return ()

    def close(self) -> None:
        """Finish the running step, end, and free the model's memory; of an engine that has died, what can be freed."""
        if self._thread is not None:
            self.send(Close())
            # An engine that dies meanwhile may be in a step that never ends.
            left = _CLOSE_S
            while left > 0 and self._thread.is_alive():
                self._thread.join(_LOOK_S)
                left -= _LOOK_S if self._ended else 0.0
            stands_still = self._thread.is_alive()
            self._thread = None
            if not stands_still:
                self._core.close()
