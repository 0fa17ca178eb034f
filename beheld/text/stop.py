"""Finds stop strings across token boundaries; holds back text that may be the beginning of one."""

from __future__ import annotations

from collections.abc import Sequence


class StopFinder:
    """Watches a text that arrives in pieces for the first of several stop strings to be completed.

    The division into pieces does not matter. If one character completes several strings, the first in the list wins.
    Each string has an automaton of Knuth, Morris and Pratt ("Fast pattern matching in strings", SIAM J. Comput. 6,
    1977): its state is the length of the longest prefix of the string that the text ends with. Its table of fallbacks
    is made as far as the text has matched, because a request may have many long strings and many answers.

    Args:
        stops: the strings; none is empty.
        include: keep the found stop string in the text.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        assert all(stops)
        self._stops = tuple(stops)
        self._include = include
        self._fallbacks = [[0] for _ in stops]
        self._states = [0] * len(self._stops)
        self._held = ""

    def push(self, text: str, *, watch: bool = True) -> tuple[str, str | None]:
        """Add text; returns (the certain text, the stop string that was found or None).

        Do not push after a find. With `watch` False a string that this piece completes is ignored.
        """
        if not self._stops:
            return text, None
        text = self._held + text
        for position in range(len(self._held), len(text)):
            found = self._step(text[position])
            if found is not None and watch:
                stop = position + 1 if self._include else position + 1 - len(found)
                return text[:stop], found
        certain = len(text) - max(self._states)
        self._held = text[certain:]
        return text[:certain], None

    def finish(self) -> str:
        """The text held back when the input ends."""
        rest, self._held = self._held, ""
        return rest

    def _step(self, character: str) -> str | None:
        """Advance every automaton by one character; returns the first string that it completes."""
        found = None
        for index, stop in enumerate(self._stops):
            state = self._states[index]
            if state and stop[state] != character:
                fallbacks = _extended(self._fallbacks[index], stop, state)
                while state and stop[state] != character:
                    state = fallbacks[state - 1]
            state += stop[state] == character
            if state == len(stop):
                found = found or stop
                state = _extended(self._fallbacks[index], stop, state)[state - 1]
            self._states[index] = state
        return found


def _extended(fallbacks: list[int], stop: str, size: int) -> list[int]:
    """For each prefix of `stop` up to `size` characters, the length of the longest shorter prefix that it ends with."""
    for position in range(len(fallbacks), size):
        state = fallbacks[-1]
        while state and stop[state] != stop[position]:
            state = fallbacks[state - 1]
        fallbacks.append(state + (stop[state] == stop[position]))
    return fallbacks
