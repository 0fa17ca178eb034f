"""Events as they cross the border of a process: the many that tell of a token and nothing else as two columns.

Written out one by one, an event takes six microseconds on either side; a step of many sequences has many of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from beheld.core.outputs import TokenEvent
from beheld.engine.messages import Events


@dataclass(frozen=True, eq=False)
class EventColumns:
    """The events of a step, in order.

    Attributes:
        request_ids: of all.
        token_ids: of all; 0 where the whole event is in `others`.
        places: where the others stand, ascending.
        others: events that tell of more than a token.

    Raises:
        ValueError: the columns do not fit together.
    """

    request_ids: tuple[str, ...]
    token_ids: tuple[int, ...]
    places: tuple[int, ...]
    others: tuple[TokenEvent, ...]

    def __post_init__(self) -> None:
        count = len(self.request_ids)
        if len(self.token_ids) != count or len(self.places) != len(self.others):
            raise ValueError("the columns of events differ in length")
        if not all(0 <= place < count for place in self.places):
            raise ValueError("an event stands outside the columns")


def columns_of(message: Events) -> EventColumns:
    """The same events as columns."""
    request_ids, token_ids, places, others = [], [], [], []
    for place, event in enumerate(message.events):
        request_ids.append(event.request_id)
        if _is_plain(event):
            token_ids.append(event.token_id or 0)
        else:
            token_ids.append(0)
            places.append(place)
            others.append(event)
    return EventColumns(tuple(request_ids), tuple(token_ids), tuple(places), tuple(others))


def events_of(columns: EventColumns) -> Events:
    """The events that the columns hold."""
    made = list(map(TokenEvent, columns.request_ids, columns.token_ids))
    for place, event in zip(columns.places, columns.others, strict=True):
        made[place] = event
    return Events(tuple(made))


def _is_plain(event: TokenEvent) -> bool:
    """True if all but the token is as in an event that was given nothing else."""
    return (
        event.token_id is not None
        and event.finish is None
        and event.stop_id is None
        and event.logprobs is None
        and event.prompt_logprobs is None
        and not event.num_cached
        and event.error is None
        and not event.waited_s
    )
