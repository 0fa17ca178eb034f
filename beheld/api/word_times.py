"""The times of words: from how strongly a transcript's tokens attend to an audio to when each word is spoken.

Shapes: N tokens, E states of the audio.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

# What is written before a word, and after one, without being a word.
_BEFORE = "\"'“¡¿([{-"
_AFTER = "\"'.。,，!！?？:：”)]}、"
_BROKEN = "\ufffd"
# What a cell of the path follows: the one before in both, the token before, the state before.
_BOTH, _TOKEN, _STATE = 0, 1, 2


def last_states(weights_NE: Any) -> list[int]:
    """Return the state at which each token is reached, on the path of the greatest weights: dynamic time warping.

            E  0  1  2  3  4
        token
          0    o--o                tokens 0, 1 and 2 are reached at the states 0, 2 and 4
          1          o--o
          2                o

    The path leads from the first token and state to the last ones, and never back. Ties are decided as in
    transformers. Cells of one diagonal depend on earlier diagonals alone, so each is computed in one call.
    """
    cost_NE = -np.asarray(weights_NE, dtype=np.float32)
    N, E = cost_NE.shape
    trace = np.full((N + 1, E + 1), _STATE, dtype=np.int8)
    trace[:, 0] = _TOKEN
    # The costs of two diagonals, by token: of the corner, and of the next one, which no path crosses.
    before, now = np.full((2, N + 1), np.inf, dtype=np.float32)
    before[0] = 0
    for diagonal in range(2, N + E + 1):
        low, high = max(1, diagonal - E), min(N, diagonal - 1)
        tokens = np.arange(low, high + 1)
        both, token, state = before[low - 1 : high], now[low - 1 : high], now[low : high + 1]
        first, second = (both < token) & (both < state), (token < both) & (token < state)
        kind = np.where(first, _BOTH, np.where(second, _TOKEN, _STATE))
        new = np.full(N + 1, np.inf, dtype=np.float32)
        new[low : high + 1] = cost_NE[tokens - 1, diagonal - tokens - 1] + np.choose(kind, (both, token, state))
        trace[tokens, diagonal - tokens] = kind
        before, now = now, new
    return _reached(trace)


def _reached(trace: np.ndarray) -> list[int]:
    """Return the first state of each token on the path back from the last cell."""
    i, j = trace.shape[0] - 1, trace.shape[1] - 1
    found = [0] * i
    while i > 0 and j > 0:
        found[i - 1] = j - 1
        kind = trace[i, j]
        i -= int(kind != _STATE)
        j -= int(kind != _TOKEN)
    return found


def word_groups(
    token_ids: Sequence[int], decode: Callable[[list[int]], str], *, spaceless: bool
) -> list[tuple[str, list[int]]]:
    """Divide a text's tokens into words; each with the places of its tokens.

    A word begins at a blank; in a language without blanks, each character is a word. Punctuation joins its neighbour.

    Args:
        decode: makes text of tokens.
    """
    groups = list(_characters(token_ids, decode))
    return _joined(groups if spaceless else list(_blanks(groups)))


def _characters(token_ids: Sequence[int], decode: Callable[[list[int]], str]) -> Iterator[tuple[str, list[int]]]:
    """Yield the fewest tokens that make whole characters."""
    whole, offset = decode(list(token_ids)), 0
    places: list[int] = []
    text = ""
    for place in range(len(token_ids)):
        places.append(place)
        text = decode([token_ids[each] for each in places])
        at = text.find(_BROKEN)
        # A broken character that is so in the whole text, too, is what the model wrote.
        if at < 0 or offset + at >= len(whole) or whole[offset + at] == _BROKEN:
            yield text, places
            offset += len(text)
            places, text = [], ""
    if places:
        yield text, places


def _blanks(groups: Sequence[tuple[str, list[int]]]) -> Iterator[tuple[str, list[int]]]:
    """Join groups up to the next that begins with a blank, or is punctuation."""
    word: tuple[str, list[int]] | None = None
    for text, places in groups:
        bare = text.strip()
        if word is None or text.startswith(" ") or bare in string.punctuation:
            if word is not None:
                yield word
            word = text, places
        else:
            word = word[0] + text, word[1] + places
    if word is not None:
        yield word


def _joined(words: Sequence[tuple[str, list[int]]]) -> list[tuple[str, list[int]]]:
    """Join punctuation with the word after it, where it opens one, or else with the word in front of it."""
    opened: list[tuple[str, list[int]]] = []
    for text, places in reversed(words):
        if opened and text.startswith(" ") and text.strip() in _BEFORE:
            behind = opened.pop()
            text, places = text + behind[0], places + behind[1]
        opened.append((text, places))
    made: list[tuple[str, list[int]]] = []
    for text, places in reversed(opened):
        if made and text in _AFTER and not made[-1][0].endswith(" "):
            made[-1] = made[-1][0] + text, made[-1][1] + places
        else:
            made.append((text, places))
    return made
