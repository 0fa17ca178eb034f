"""Detection of answers that repeat themselves without end, as vLLM's `repetition_detection`."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from beheld.core.errors import ParamsError

# Each new token is compared with as many earlier ones as there are sizes.
MAX_PATTERN = 512
MAX_COUNT = 1 << 20


@dataclass(frozen=True)
class RepetitionDetectionParams:
    """When an answer counts as a repetition: its end is a pattern of tokens several times in a row.

        a b c d  c d  c d          ends with the pattern "c d" three times

    Attributes:
        max_pattern_size: tokens of the longest pattern; 0 switches the detection off.
        min_pattern_size: tokens of the shortest pattern; 0 means 1.
        min_count: how often a pattern must stand, at least 2.
        after: tokens at an answer's beginning that count for nothing. vLLM has no such limit.
        least: tokens of the shortest repetition, all its patterns together. vLLM has no such limit.

    Raises:
        ParamsError: a value is out of range.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0
    after: int = 0
    least: int = 0

    def __post_init__(self) -> None:
        for name in ("max_pattern_size", "min_pattern_size", "min_count", "after", "least"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise _wrong(f"{name} must be a whole number of at least 0, got {value!r}")
        if self.max_pattern_size > MAX_PATTERN or self.min_count > MAX_COUNT:
            raise _wrong(f"max_pattern_size may be {MAX_PATTERN} and min_count {MAX_COUNT} at most")
        if self.min_pattern_size > self.max_pattern_size:
            raise _wrong("min_pattern_size is greater than max_pattern_size")
        if self.max_pattern_size and self.min_count < 2:
            raise _wrong("min_count must be at least 2")


@dataclass(frozen=True)
class NoRepeatWindow:
    """A ban on repetition within the end of an answer: no token follows that completes a repetition there.

    Attributes:
        size: tokens that do not stand twice in the same order among the last `window`.
        window: how many of the answer's last tokens are searched, at least `size`.
        spared: token ids that are never banned.
    """

    size: int
    window: int
    spared: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        assert 1 <= self.size <= self.window


class RepetitionRuns:
    """Follows one answer, at a cost that depends on the pattern's sizes alone.

    For each size n it keeps how many of the last tokens equal the token n places before them.

    Args:
        rule: when the answer counts as a repetition.
    """

    def __init__(self, rule: RepetitionDetectionParams) -> None:
        self._rule = rule
        self._first = max(1, rule.min_pattern_size)
        self._runs = [0] * (rule.max_pattern_size - self._first + 1)
        self._newest: deque[int] = deque(maxlen=rule.max_pattern_size)
        self._length = 0

    def push(self, token_id: int) -> bool:
        """Add a token; return whether the answer now ends with a repetition."""
        self._length += 1
        if self._length <= self._rule.after:
            return False
        known, runs, found = self._newest, self._runs, False
        again, least = self._rule.min_count - 1, self._rule.least
        for index in range(min(len(runs), len(known) - self._first + 1)):
            size = self._first + index
            runs[index] = runs[index] + 1 if known[-size] == token_id else 0
            found = found or runs[index] >= max(size * again, least - size)
        known.append(token_id)
        return found


def _wrong(reason: str) -> ParamsError:
    return ParamsError(
        f"repetition_detection: {reason}.",
        "Give for example max_pattern_size 20 and min_count 10.",
        param="repetition_detection",
    )
