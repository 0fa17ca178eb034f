"""One engine for several fronts: the requests of each front are its own, and so are their events.

    front 0, in this process        --------------------------\\
    front 1, in its own process  ~~ link ~~  FrontRelay  ------  SharedEngine -- Engine
    front 2                      ~~ link ~~  FrontRelay  -----/

The fronts' request ids and call numbers differ (api/front_place.py), so that nothing is renamed on the way. What is not
known as another front's belongs to front 0, whose messages pass as they are. Of the engine's state all fronts hear:
that it sleeps, wakes up, or has died.
"""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Sequence

from beheld.core.errors import StepError
from beheld.core.outputs import TokenEvent
from beheld.core.request import FinishReason, Request
from beheld.engine.crossing import send_reply, unread_frame
from beheld.engine.linked_engine import LinkedEngine
from beheld.engine.messages import (
    Abort,
    AddLoRA,
    Asleep,
    CheckWeights,
    ClearCache,
    Close,
    Died,
    Engine,
    Events,
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
    WakingUp,
    WeightsChecked,
)
from beheld.engine.stats import EngineReport
from beheld.utils.log import get_logger
from beheld.wire.codec import Codec
from beheld.wire.link import FrameError, Link, end_with
from beheld.wire.stream_link import StreamLink

logger = get_logger(__name__)

Connection = Link | StreamLink

# As EngineProcess has them for features.
_MAX_KEPT = 4
_CLOSE_S = 1.0


class EngineView:
    """What one further front sends, and where its replies go; see SharedEngine.view."""

    def __init__(self, shared: SharedEngine, receive: Callable[[Reply], None]) -> None:
        self._shared = shared
        self.receive = receive

    def send(self, message: Message) -> None:
        """Send a message of this front."""
        self._shared.send_of(self, message)

    def leave(self) -> None:
        """The front has ended: abort its requests."""
        self._shared.leave(self)


class SharedEngine:
    """An engine with several users; for the first one it is an engine like another, see messages.Engine.

    Args:
        engine: not yet started.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._receive: Callable[[Reply], None] = lambda reply: None
        # Never held while the engine is called, which may hold a lock of its own that its replies come with.
        self._lock = threading.Lock()
        self._views: list[EngineView] = []
        # Requests and calls of the further fronts.
        self._view_by_id: dict[str, EngineView] = {}
        self._view_by_number: dict[int, EngineView] = {}
        self._asleep: Asleep | None = None

    # ------------------------------------------------------------------ the engine of the first front

    def start(self, receive: Callable[[Reply], None]) -> None:
        """Start the engine."""
        self._receive = receive
        self._engine.start(self._take)

    def send(self, message: Message) -> None:
        """Send a message of the first front."""
        if isinstance(message, WakeUp):
            self._tell_others(None, WakingUp(message.number))
        self._engine.send(message)

    @property
    def alive(self) -> bool:
        """False after the engine died or was closed."""
        return self._engine.alive

    def reports(self) -> tuple[EngineReport, ...]:
        """As DataParallelEngines.reports; of one engine nothing."""
        return self._engine.reports()

    def close(self) -> None:
        """End the engine."""
        self._engine.close()

    # ------------------------------------------------------------------ further fronts

    def view(self, receive: Callable[[Reply], None]) -> EngineView:
        """A further user; a thread of the engine's side calls `receive`, which must be quick."""
        view = EngineView(self, receive)
        with self._lock:
            self._views.append(view)
            if self._asleep is not None:
                # Under the lock: what the engine says next must come after it.
                receive(self._asleep)
        return view

    def send_of(self, view: EngineView, message: Message) -> None:
        """Send a message of a view."""
        if isinstance(message, Submit):
            message = Submit(self._owned(view, message.requests))
        elif isinstance(message, Stop):
            # No event follows.
            with self._lock:
                self._view_by_id.pop(message.request_id, None)
        elif isinstance(message, Ping | AddLoRA | ManageLoRA | Sleep | WakeUp | Profile | CheckWeights):
            with self._lock:
                self._view_by_number[message.number] = view
            if isinstance(message, WakeUp | CheckWeights):
                # Both may take minutes, in which the engine says nothing.
                self._tell_others(view, WakingUp(message.number))
        elif not isinstance(message, Abort | ClearCache):
            logger.error("A front sent a %s, which is dropped.", type(message).__name__)
            return
        self._engine.send(message)

    def leave(self, view: EngineView) -> None:
        """Abort the requests of a view; it gets no more replies."""
        view.receive = lambda reply: None
        with self._lock:
            if view in self._views:
                self._views.remove(view)
            left = tuple(name for name, owner in self._view_by_id.items() if owner is view)
            for number in [number for number, owner in self._view_by_number.items() if owner is view]:
                del self._view_by_number[number]
        if left:
            # Their last events come to nobody.
            self._engine.send(Abort(left))

    def _owned(self, view: EngineView, requests: Sequence[Request]) -> tuple[Request, ...]:
        """The requests, which are the view's from now on, without those whose ids are in use."""
        with self._lock:
            taken = [request.id for request in requests if request.id in self._view_by_id]
            kept = tuple(request for request in requests if request.id not in self._view_by_id)
            self._view_by_id.update((request.id, view) for request in kept)
        if taken:
            error = StepError("A request of another front has the same id.", "Send it again.")
            view.receive(Events(tuple(TokenEvent(name, (), FinishReason.ERROR, error=error) for name in taken)))
        return kept

    # ------------------------------------------------------------------ replies

    def _take(self, reply: Reply) -> None:
        """Called in a thread of the engine's side."""
        if isinstance(reply, Events):
            self._share_out(reply)
        elif isinstance(reply, Pong | LoRAAdded | LoRAsManaged | Asleep | Profiled | WeightsChecked):
            with self._lock:
                view = self._view_by_number.pop(reply.number, None)
                if isinstance(reply, Asleep):
                    self._asleep = reply if reply.lacks else None
            (self._receive if view is None else view.receive)(reply)
            if isinstance(reply, Asleep | WeightsChecked):
                self._tell_others(view, reply)
        elif isinstance(reply, Unread):
            self._share_out_unread(reply)
        else:
            self._receive(reply)
            if isinstance(reply, Died):
                self._tell_others(None, reply)

    def _share_out(self, reply: Events) -> None:
        """Give each front the events of its requests."""
        views = self._view_by_id
        if not views:
            self._receive(reply)
            return
        own: list[TokenEvent] = []
        others: dict[EngineView, list[TokenEvent]] = {}
        with self._lock:
            for event in reply.events:
                view = views.get(event.request_id)
                if view is None:
                    own.append(event)
                    continue
                others.setdefault(view, []).append(event)
                if event.finish is not None:
                    del views[event.request_id]
        if own:
            self._receive(Events(tuple(own)) if others else reply)
        for view, events in others.items():
            view.receive(Events(tuple(events)))

    def _share_out_unread(self, reply: Unread) -> None:
        """A message to or from the engine could not be read: tell the front whose it was.

        Of a call all hear: it may have been one to wake up, which they know of.
        """
        ids: dict[EngineView | None, list[str]] = {}
        with self._lock:
            for name in reply.request_ids:
                ids.setdefault(self._view_by_id.pop(name, None), []).append(name)
            if reply.number is not None:
                self._view_by_number.pop(reply.number, None)
                for each in (None, *self._views):
                    ids.setdefault(each, [])
        for view, names in ids.items():
            (self._receive if view is None else view.receive)(Unread(tuple(names), reply.number))

    def _tell_others(self, view: EngineView | None, reply: Reply) -> None:
        """Send a reply to all fronts but one, of which None is the first."""
        with self._lock:
            others = [each for each in self._views if each is not view]
        if view is not None:
            self._receive(reply)
        for other in others:
            other.receive(reply)


class FrontRelay:
    """Carries the messages of a front in another process to the engine, and its replies back.

    Args:
        shared: the engine.
        link: the connection to the front.
        ended: is called in a thread of this object once the front has ended, after its requests were aborted.
    """

    def __init__(self, shared: SharedEngine, link: Connection, ended: Callable[[], None]) -> None:
        self._link = link
        self._ended = ended
        self._outbox: queue.SimpleQueue[Reply | None] = queue.SimpleQueue()
        self._view = shared.view(self._outbox.put)
        for work in (self._listen, self._send_all):
            threading.Thread(target=work, name="beheld-front-link", daemon=True).start()

    def _listen(self) -> None:
        while True:
            try:
                message: Message = self._link.receive()
            except FrameError as error:
                concerned = unread_frame(error)
                if concerned is not None:
                    self._outbox.put(concerned)
                continue
            except EOFError:
                break
            if isinstance(message, Close):
                break
            self._view.send(message)
        self._view.leave()
        self._outbox.put(None)
        self._ended()

    def _send_all(self) -> None:
        while (reply := self._outbox.get()) is not None:
            try:
                lost = send_reply(reply, self._link)
            except OSError:
                # `_listen` sees the end, too.
                return
            if lost is not None and lost.request_ids:
                # Nobody gets the rest of their answers.
                self._view.send(Abort(lost.request_ids))


class RelayedEngine(LinkedEngine):
    """The engine as a further front in its own process sees it; see messages.Engine.

    Args:
        link: the connection to the process that has the engine.
    """

    _end_of_link = "the process that has it has ended"

    def __init__(self, link: Connection) -> None:
        super().__init__(link)
        self._reports: tuple[EngineReport, ...] = ()

    def reports(self) -> tuple[EngineReport, ...]:
        """What each of several engines did at the last ping."""
        return self._reports

    def close(self) -> None:
        """Leave the engine; it aborts what is left of this front."""
        self._leave(_CLOSE_S)
        self._link.close()

    def _seen(self, reply: Reply) -> None:
        if isinstance(reply, Pong):
            self._reports = reply.stats.engines


def link_to_main(descriptor: int, codec: Codec) -> Link:
    """The connection of a further front's process to the one that has the engine; this process ends with that one.

    Args:
        descriptor: of this side's end of the sockets, which it inherits.
        codec: the same on both sides.
    """
    end = socket.socket(fileno=descriptor)
    end_with(end)
    return Link(end, codec, _MAX_KEPT)
