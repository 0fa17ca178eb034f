"""The states of media items that the tokens of a step attend to, gathered from the rows and the encoder cache."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from torch import Tensor

from beheld.attention.cross import CrossMetadata, CrossRun
from beheld.core.plan import SeqSlice, SpanView
from beheld.runner.encoder_cache import EncoderCache
from beheld.runner.rows import LastView, Row, Rows
from beheld.runner.staging import to_device

# Items that a token attends to, as (span, number of its first states).
Seen = tuple[tuple[SpanView, int], ...]


def gather(
    slices: Sequence[SeqSlice], first_token: Sequence[int], rows: Rows, store: EncoderCache
) -> CrossMetadata | None:
    """The runs of a step; None if none of its sequences has states.

    Args:
        slices: in the order of the batch.
        first_token: where each slice's tokens start in the batch.

    Raises:
        StepError: states that are needed are not on the device.
    """
    total = first_token[-1] + slices[-1].stop - slices[-1].start
    sighted = np.zeros(total, dtype=np.float32)
    ranges: dict[tuple[tuple[bytes, int], ...], list[tuple[int, int]]] = {}
    views: dict[bytes, SpanView] = {}
    for piece, first in zip(slices, first_token, strict=True):
        row = rows[piece.row]
        for low, high, seen, shown in _stretches(row, piece.start, piece.stop):
            place = first + low - piece.start, first + high - piece.start
            if shown:
                sighted[place[0] : place[1]] = 1.0
            for span, _ in seen:
                views[span.digest] = span
            key = tuple([(span.digest, count) for span, count in seen])
            ranges.setdefault(key, []).append(place)
    if not ranges:
        return None
    runs = tuple(
        [
            CrossRun(tuple(places), tuple([_first(store.states(views[digest]), count) for digest, count in key]))
            for key, places in ranges.items()
        ]
    )
    return CrossMetadata(runs, to_device({"sighted": sighted}, rows.newest_P.device)["sighted"])


def _first(states: Tensor, count: int) -> Tensor:
    """The first states of an item."""
    return states if len(states) == count else states[:count]


def _stretches(row: Row, start: int, stop: int) -> Iterator[tuple[int, int, Seen, bool]]:
    """Ranges of positions (low, high), the states that they attend to, and whether these are shown to them.

    A token to which no item is shown attends to all of all items:

        position   0 .. 3 | 4 .. 8 | 9 ..         items a from 4 to 9, b from 9 on
        sees       a, b   | a      | b
    """
    if not row.cross_views:
        return
    last = row.last_view
    if last is not None and last.start <= start:
        yield start, stop, last.seen, last.shown
        return
    edges = sorted({edge for view in row.cross_views for edge in (view.start, view.stop) if edge is not None})
    cuts = [start, *(edge for edge in edges if start < edge < stop), stop]
    for low, high in itertools.pairwise(cuts):
        view = LastView(low, *_seen_at(row, low))
        if low >= edges[-1]:
            row.last_view = view
        yield low, high, view.seen, view.shown


def _seen_at(row: Row, position: int) -> tuple[Seen, bool]:
    """What the token at a position attends to, and whether that is shown to it."""
    views = zip(row.spans, row.cross_views, strict=True)
    seen = tuple([(span, view.count) for span, view in views if view.covers(position)])
    if seen:
        return seen, True
    return tuple([(span, span.num_states) for span in row.spans if span.num_states]), False
