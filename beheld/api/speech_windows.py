"""Windows of long audio: where each ends, and the segments that timestamps divide a window into.

Shapes: N samples.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

# Where windows are independent, each ends at the quietest moment of its last second.
_SEARCH_S = 1.0
_MOMENT_S = 0.1


class Stretch(NamedTuple):
    """A segment within a window: seconds from its start, and its text's tokens."""

    start_s: float
    stop_s: float
    token_ids: tuple[int, ...]


def cuts(samples_N: Any, rate: int, window_s: float) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of windows of at most `window_s` seconds that cover the samples, cut where it is quiet."""
    most, total, start = int(window_s * rate), len(samples_N), 0
    while start < total:
        stop = total if total - start <= most else _quiet(samples_N, rate, start, start + most)
        yield start, stop
        start = stop


def _quiet(samples_N: Any, rate: int, start: int, stop: int) -> int:
    """Return the middle of the quietest moment in the last second before `stop`."""
    size = max(1, int(_MOMENT_S * rate))
    first = max(start + size, stop - int(_SEARCH_S * rate))
    count = (stop - first) // size
    if count < 1:
        return stop
    energy = np.square(samples_N[first : first + count * size].astype(np.float64)).reshape(count, size).sum(1)
    return first + int(energy.argmin()) * size + size // 2


def divided(
    token_ids: Sequence[int], first: int, end: int, step_s: float, window_s: float
) -> tuple[list[Stretch], float]:
    """Divide the tokens of a window at its timestamps, as Whisper's own decoding does.

        <0.00> a <2.40> <2.40> b <5.00>           segments 0.00 to 2.40, 2.40 to 5.00; the next window is 30 s later
        <0.00> a <2.40> <2.40> b                  one segment; the next window starts at 2.40, before what was cut off

    Args:
        token_ids: of the answer.
        first, end: see SpeechTokens.
        step_s: seconds between two timestamps.
        window_s: length of the window's audio.

    Returns:
        The segments, and where the next window starts, in seconds.
    """
    ids = list(token_ids[:-1] if token_ids and token_ids[-1] == end else token_ids)
    stamps = [token >= first for token in ids]
    single = stamps[-2:] == [False, True]
    borders = [index for index in range(1, len(ids)) if stamps[index - 1] and stamps[index]]

    def text(part: Sequence[int]) -> tuple[int, ...]:
        return tuple(token for token in part if token < end)

    if not borders:
        last = next((token for token in reversed(ids) if token >= first), first)
        stop_s = (last - first) * step_s if last > first else window_s
        return [Stretch(0.0, min(stop_s, window_s), text(ids))], window_s
    found, begin = [], 0
    for border in [*borders, *([len(ids)] if single else [])]:
        part = ids[begin:border]
        found.append(Stretch((part[0] - first) * step_s, (part[-1] - first) * step_s, text(part)))
        begin = border
    if single:
        return found, window_s
    return found, (ids[begin - 1] - first) * step_s


def compression(text: str) -> float:
    """Return bytes of a text over its bytes after compression: how much it repeats itself."""
    data = text.encode()
    return len(data) / len(zlib.compress(data)) if data else 0.0
