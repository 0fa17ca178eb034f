"""Token events in columns, the form in which they cross a process boundary.

Serialized one by one, an event takes six microseconds on either side, and a step with many sequences has many events.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from beheld.core.outputs import TokenEvent
from beheld.engine.messages import Events

# Takes the place of an event's tokens in the columns where the event itself is sent.
_ONE = (0,)


@dataclass(frozen=True, eq=False)
class EventColumns:
    """The events of a step, in order.

    Attributes:
        request_ids: the request of each event.
        token_ids: the tokens of all events, concatenated; an event in `others` has one 0.
        counts: number of tokens of each event; empty if each has one.
        places: indices of the events that are in `others`, ascending.
        others: the events that carry more than tokens.

    Raises:
        ValueError: the columns are inconsistent.
    """

    request_ids: tuple[str, ...]
    token_ids: tuple[int, ...]
    counts: tuple[int, ...]
    places: tuple[int, ...]
    others: tuple[TokenEvent, ...]

    def __post_init__(self) -> None:
        count = len(self.request_ids)
        counts = self.counts or (1,) * count
        if len(counts) != count or min(counts, default=0) < 0 or len(self.token_ids) != sum(counts):
            raise ValueError("the columns of events differ in length")
        if len(self.places) != len(self.others):
            raise ValueError("the columns of events differ in length")
        if not all(0 <= place < count for place in self.places):
            raise ValueError("an event's index is outside the columns")


def columns_of(message: Events) -> EventColumns:
    """The events as columns."""
    request_ids: list[str] = []
    token_ids: list[int] = []
    counts: list[int] = []
    places: list[int] = []
    others: list[TokenEvent] = []
    for place, event in enumerate(message.events):
        request_ids.append(event.request_id)
        own = event.token_ids if _is_plain(event) else _ONE
        if own is _ONE:
            places.append(place)
            others.append(event)
        token_ids += own
        counts.append(len(own))
    if len(token_ids) == len(counts) and set(counts) <= {1}:
        counts.clear()
    return EventColumns(tuple(request_ids), tuple(token_ids), tuple(counts), tuple(places), tuple(others))


def events_of(columns: EventColumns) -> Events:
    """The events in `columns`."""
    ids = iter(columns.token_ids)
    if columns.counts:
        tokens = [tuple(itertools.islice(ids, count)) for count in columns.counts]
    else:
        tokens = list(zip(ids, strict=False))
    made = list(map(TokenEvent, columns.request_ids, tokens))
    for place, event in zip(columns.places, columns.others, strict=True):
        made[place] = event
    return Events(tuple(made))


def _is_plain(event: TokenEvent) -> bool:
    """True if the event carries tokens and nothing else."""
    return (
        bool(event.token_ids)
        and event.finish is None
        and event.stop_id is None
        and not event.logprobs
        and event.prompt_logprobs is None
        and not event.num_cached
        and event.error is None
        and not event.waited_s
        and event.pooled is None
        and not event.restarted
        and not event.num_preemptions
    )
