"""Holds back the tokens of answers of which only the end is read, and sends several at a time.

For the process that reads them, an event costs far more than one more token in it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from beheld.core.outputs import TokenEvent
from beheld.core.request import Request

_AT_A_TIME = 64


class HeldTokens:
    """The tokens that are held back, by request.

    A request's first event is never held: it says when the answer began.
    """

    def __init__(self) -> None:
        # Of requests whose tokens are held; None before the first event.
        self._held: dict[str, list[int] | None] = {}
        self._most: dict[str, int] = {}
        # Answers that started together are sent at different steps; a short one is sent at its end alone.
        self._sizes = itertools.cycle(range(_AT_A_TIME, 2 * _AT_A_TIME))

    def add(self, requests: Iterable[Request]) -> None:
        """Hold the tokens of those requests that allow it."""
        for request in requests:
            if request.at_end:
                self._held[request.id] = None
                self._most[request.id] = next(self._sizes)

    def drop(self, request_ids: Iterable[str]) -> None:
        """Forget requests that have ended without an event."""
        for name in request_ids:
            self._held.pop(name, None)
            self._most.pop(name, None)

    def take(self, events: tuple[TokenEvent, ...]) -> tuple[TokenEvent, ...]:
        """Return what is to be sent now, in order."""
        return tuple(self._sent(events)) if self._held else events

    def _sent(self, events: Iterable[TokenEvent]) -> Iterator[TokenEvent]:
        for event in events:
            name = event.request_id
            if name not in self._held:
                yield event
                continue
            held = self._held[name]
            if event.finish is not None:
                self.drop((name,))
            elif held is None:
                self._held[name] = []
            else:
                held += event.token_ids
                if len(held) >= self._most[name]:
                    self._most[name] = _AT_A_TIME
                    self._held[name] = []
                    yield event._replace(token_ids=tuple(held))
                continue
            yield event._replace(token_ids=(*held, *event.token_ids)) if held else event
