"""The requests that AsyncLLM has submitted and that have not ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable

from beheld.api.live_request import LiveRequest, Pieces
from beheld.core.errors import EngineError
from beheld.core.outputs import TokenEvent
from beheld.core.request import FinishReason
from beheld.utils.tally import Tally

# Bounds of the seconds from token to token.
_TOKEN_GAPS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)


class LiveRequests:
    """Live requests by the ids of the engine's requests, to which the engine's events are given.

    Args:
        stop: ends a request of the engine whose answer has ended, as a stop string does.

    Attributes:
        token_gaps: seconds from token to token of answers, as they come from the engine.
    """

    def __init__(self, stop: Callable[[str], None]) -> None:
        self._stop = stop
        self._by_id: dict[str, LiveRequest] = {}
        self.token_gaps = Tally(_TOKEN_GAPS)

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def add(self, live: LiveRequest) -> None:
        """Take in a request that is about to be submitted."""
        self._by_id.update(dict.fromkeys(live.request_ids, live))

    def named(self, request_id: str) -> LiveRequest | None:
        """Return the request of that name, which the engine knows by this name or by those of its answers."""
        return self._by_id.get(request_id) or self._by_id.get(f"{request_id}#0")

    def among(self, names: Collection[str]) -> tuple[str, ...]:
        """The engine's names of the answers of these requests, and of those that have a dash and a number behind."""
        wanted, found = frozenset(names), list[str]()
        for each in self._by_id:
            whole = each.partition("#")[0]
            part, _, number = whole.rpartition("-")
            if whole in wanted or (number.isdecimal() and part in wanted):
                found.append(each)
        return tuple(found)

    def drop(self, live: LiveRequest) -> tuple[str, ...]:
        """Forget a request; returns the ids of those of its answers that have not ended."""
        return tuple(name for name in live.request_ids if self._by_id.pop(name, None) is not None)

    def push(self, event: TokenEvent, now: float) -> None:
        """Give an event to its request, and wake up who waits for it."""
        live = self._by_id.get(event.request_id)
        if live is None:
            return
        if live.first_token is None:
            live.first_token = now
            live.waited_s = event.waited_s
        if event.num_preemptions:
            live.num_preemptions[event.request_id] = event.num_preemptions
        if event.token_ids:
            if (last := live.last_tokens.get(event.request_id)) is not None:
                # Of an answer that is read at its end several tokens come at once.
                self.token_gaps.add((now - last) / len(event.token_ids), len(event.token_ids))
            live.last_tokens[event.request_id] = now
        if live.collector.push(event):
            self._stop(event.request_id)
            del self._by_id[event.request_id]
        elif event.finish is not None:
            del self._by_id[event.request_id]
        elif live.pieces is Pieces.FINAL:
            # Most events: the request goes on, and only its end is waited for.
            return
        if live.pieces is not Pieces.FINAL or live.collector.finished:
            live.changed.set()

    def fail(self, error: EngineError, request_ids: Iterable[str] | None = None) -> None:
        """Fail these of the engine's requests; without ids, all."""
        for name in list(self._by_id) if request_ids is None else request_ids:
            self.push(TokenEvent(name, (), FinishReason.ERROR, error=error), time.monotonic())
