"""How much prefill a step may hold while others wait: learned from the time that steps take."""

from __future__ import annotations

import math

# A step with prefill may always take this many times as long as one without: on a slow device, steps of a few prompt
# positions would mostly read weights.
_MIN_RATIO = 3.0
# While nobody else waits, a step may take this many times as long; it is the longest that the next client waits.
_ALONE_RATIO = 16.0
# Positions that a step may always prefill, and positions that it may prefill before any cost is known.
_MIN_TOKENS, _FIRST_TOKENS = 32, 256
# The cost of a position with log-probabilities, in plain positions: before it is measured, and at most.
_FIRST_WEIGHT, _MAX_WEIGHT = 8.0, 64.0
# A single step changes a cost by no more than these factors: compiling a kernel or a busy machine says little.
_MIN_FACTOR, _MAX_FACTOR = 0.25, 2.0
_SMOOTHING = 0.2


class StepPace:
    """Turns a limit on a step's time into a limit on the prompt positions that it computes.

    The unit is the cost of one plain position. A position whose log-probabilities are reported costs `weight` units,
    because the whole vocabulary is computed and sorted there.

    Args:
        max_step_s: seconds that a step with prefill should take at most.
    """

    def __init__(self, max_step_s: float) -> None:
        self._max_step_s = max_step_s
        # Seconds of a step without prefill, and of one position of each kind; None before it is known.
        self._base_s = 0.0
        self._plain_s: float | None = None
        self._reported_s: float | None = None

    def units(self, *, alone: bool = False) -> int | None:
        """The most units that one step may prefill; None for no limit, before a cost is known.

        Args:
            alone: only sequences whose prompts are being computed wait.
        """
        least, seconds = max(_MIN_TOKENS, 4 * self.weight), self._left_s(alone=alone)
        if self._plain_s is not None:
            return max(least, int(seconds / self._plain_s))
        if self._reported_s is not None:
            return max(least, self.weight * int(seconds / self._reported_s))
        return None if alone else _FIRST_TOKENS

    @property
    def weight(self) -> int:
        """Units of a position whose log-probabilities are reported."""
        if self._plain_s is None or self._reported_s is None:
            return int(_FIRST_WEIGHT)
        return math.ceil(min(max(self._reported_s / self._plain_s, 1.0), _MAX_WEIGHT))

    def _left_s(self, *, alone: bool) -> float:
        most_s = self._max_step_s * (_ALONE_RATIO if alone else 1.0)
        return max(most_s, _MIN_RATIO * self._base_s) - self._base_s

    def observe(self, num_plain: int, num_reported: int, seconds: float) -> None:
        """Learn from a step that prefilled so many positions of each kind.

        What it took longer or shorter than expected is attributed to each part in proportion to its expected time.
        """
        if not num_plain and not num_reported:
            self._base_s = seconds if not self._base_s else self._base_s + _SMOOTHING * (seconds - self._base_s)
            return
        rest_s = max(seconds - self._base_s, 0.1 * seconds)
        first_s = rest_s / (num_plain + _FIRST_WEIGHT * num_reported)
        plain_s = self._plain_s or (self._reported_s / _FIRST_WEIGHT if self._reported_s else first_s)
        reported_s = self._reported_s or _FIRST_WEIGHT * plain_s
        expected_s = plain_s * num_plain + reported_s * num_reported
        factor = min(max(rest_s / expected_s, _MIN_FACTOR), _MAX_FACTOR)
        if num_plain:
            self._plain_s = plain_s * factor ** (plain_s * num_plain / expected_s)
        if num_reported:
            self._reported_s = reported_s * factor ** (reported_s * num_reported / expected_s)
