"""The states of media items that the tokens of a step attend to, gathered from the rows and the encoder store."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from beheld.attention.cross import CrossMetadata, CrossRun
from beheld.core.plan import SeqSlice, SpanView
from beheld.runner.encoder import EncoderStore
from beheld.runner.rows import Row, Rows
from beheld.runner.staging import to_device

# Items that a token attends to, as (index of the span, number of its first states).
Seen = tuple[tuple[int, int], ...]


def gather(
    slices: Sequence[SeqSlice], first_token: Sequence[int], rows: Rows, store: EncoderStore
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
            sighted[place[0] : place[1]] = shown
            spans = [row.spans[index] for index, _ in seen]
            views |= {span.digest: span for span in spans}
            key = tuple((span.digest, count) for span, (_, count) in zip(spans, seen, strict=True))
            ranges.setdefault(key, []).append(place)
    if not ranges:
        return None
    runs = tuple(
        CrossRun(tuple(places), tuple(store.states(views[digest])[:count] for digest, count in key))
        for key, places in ranges.items()
    )
    return CrossMetadata(runs, to_device({"sighted": sighted}, rows.newest_P.device)["sighted"])


def _stretches(row: Row, start: int, stop: int) -> Iterator[tuple[int, int, Seen, bool]]:
    """Ranges of positions (low, high), the states that they attend to, and whether these are shown to them.

    A token to which no item is shown attends to all of all items:

        position   0 .. 3 | 4 .. 8 | 9 ..         items a from 4 to 9, b from 9 on
        sees       a, b   | a      | b
    """
    if not row.cross_views:
        return
    edges = {edge for view in row.cross_views for edge in (view.start, view.stop) if edge is not None}
    cuts = [start, *sorted(edge for edge in edges if start < edge < stop), stop]
    everything = tuple((index, span.num_states) for index, span in enumerate(row.spans) if span.num_states)
    for low, high in itertools.pairwise(cuts):
        seen = tuple((index, view.count) for index, view in enumerate(row.cross_views) if view.covers(low))
        yield low, high, seen or everything, bool(seen)
