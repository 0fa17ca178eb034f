"""What the fronts of one server know of each other without asking: a file that all of them map.

    file    of each front: its columns, 8 bytes each

A front writes its own row; the first process resets the row of one that has ended.
"""

from __future__ import annotations

import mmap
import os
import time
from enum import IntEnum, StrEnum
from pathlib import Path

from beheld.api.front_place import FrontPlace

# In the place of a share: the front accepts nothing.
AWAY = (1 << 63) - 1
# Without a beat for so long, a front is silent: the machine is busy, or it hangs.
SILENT_S = 2.0
# The most that one look adds to a silence: a process that stood still itself knows nothing of the others.
_LOOK_S = 0.5


class Column(IntEnum):
    """What a front says of itself."""

    SHARE = 0
    """What its connections count for where they are shared out, or AWAY."""
    CONNECTIONS = 1
    ANSWERS = 2
    HELD_BYTES = 3
    BEATS = 4
    """Grows while its event loop runs; 0 until it serves."""
    RESTARTS = 5


class FrontTable:
    """The table of all fronts.

    Args:
        path: the file, which the first front makes.
        place: which front this process is.
    """

    def __init__(self, path: Path, place: FrontPlace) -> None:
        self.place = place
        size = 8 * len(Column) * place.count
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            made = place.number == 0 and not os.fstat(file).st_size
            if made:
                os.ftruncate(file, size)
            self._cells = memoryview(mmap.mmap(file, size)).cast("q")
        finally:
            os.close(file)
        # Once: when the first front's server is made, the others may already accept.
        for number in range(place.count) if made else ():
            self.reset(number, 0)

    def put(self, column: Column, value: int) -> None:
        """Set a cell of this front."""
        self._cells[self.place.number * len(Column) + column] = value

    def column(self, column: Column) -> list[int]:
        """The cells of all fronts."""
        return self._cells[column :: len(Column)].tolist()

    def others(self, column: Column) -> int:
        """The sum over the other fronts."""
        cells = self._cells[column :: len(Column)]
        return sum(cells.tolist()) - cells[self.place.number]

    def beat(self) -> None:
        """Give a sign of life of this front."""
        self._cells[self.place.number * len(Column) + Column.BEATS] += 1

    def expect(self, number: int) -> None:
        """Count a front that is ready as one that serves: from now on it should beat."""
        cell = number * len(Column) + Column.BEATS
        self._cells[cell] = max(1, self._cells[cell])

    def reset(self, number: int, restarts: int) -> None:
        """Set the row of a front that has ended, or that is started anew."""
        row = number * len(Column)
        for column in Column:
            self._cells[row + column] = 0
        self._cells[row + Column.SHARE] = AWAY
        self._cells[row + Column.RESTARTS] = restarts

    def leave(self, number: int) -> None:
        """Let the others accept what a front would, until it says anew what it has."""
        self._cells[number * len(Column) + Column.SHARE] = AWAY


class FrontState(StrEnum):
    """What a front does now."""

    SERVING = "serving"
    SILENT = "silent"
    """Its event loop stands still: it gets no processor time, or it hangs."""
    STARTING = "starting"
    """It starts, for the first time or anew."""


class FrontWatch:
    """How long each front has given no sign of life, by the time that this process has run meanwhile."""

    def __init__(self, table: FrontTable) -> None:
        self._table = table
        self._beats = table.column(Column.BEATS)
        self._silence_s = [0.0] * len(self._beats)
        self._looked: float | None = None

    def look(self) -> None:
        """See who is alive; called at intervals of less than half a second."""
        now = time.monotonic()
        passed = 0.0 if self._looked is None else min(now - self._looked, _LOOK_S)
        self._looked = now
        for number, beats in enumerate(self._table.column(Column.BEATS)):
            alive = beats == 0 or beats != self._beats[number]
            self._silence_s[number] = 0.0 if alive else self._silence_s[number] + passed
            self._beats[number] = beats

    def silence_s(self, number: int) -> float:
        """How long a front that serves has been silent."""
        return self._silence_s[number]

    def state(self, number: int) -> FrontState:
        """What a front does."""
        if self._silence_s[number] > SILENT_S:
            return FrontState.SILENT
        # The first one may be that of `expect`.
        return FrontState.SERVING if self._beats[number] > 1 else FrontState.STARTING

    def reports(self) -> list[dict[str, object]]:
        """Of each front its number, its state, and how often it was started anew."""
        restarts = self._table.column(Column.RESTARTS)
        return [
            {"front": number, "state": self.state(number), "restarts": restarts[number]}
            for number in range(len(restarts))
        ]
