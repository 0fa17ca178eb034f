"""What the fronts of one server know of each other without asking: memory that all of them map.

    table   of each front: its columns, 8 bytes each

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


def make_table(folder: str, count: int) -> int:
    """Make the table of so many fronts, and return its descriptor.

    Args:
        folder: where it is a file, on a system that has no files in memory alone.

    Raises:
        OSError: there is no room for it.
    """
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("beheld-fronts")
    else:
        file = os.open(Path(folder, "table"), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        # Who writes to a file that lacks blocks is ended where there is no room for them.
        os.posix_fallocate(file, 0, _size(count))
        table = FrontTable(file, FrontPlace(0, count))
    except BaseException:
        os.close(file)
        raise
    for number in range(count):
        table.reset(number, 0)
    return file


def _size(count: int) -> int:
    return 8 * len(Column) * count


class FrontTable:
    """The table of all fronts.

    Args:
        file: its descriptor, from `make_table`; not used once the table is mapped.
        place: which front this process is.
    """

    def __init__(self, file: int, place: FrontPlace) -> None:
        self.place = place
        self._cells = memoryview(mmap.mmap(file, _size(place.count))).cast("q")

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
        values = {Column.SHARE: AWAY, Column.RESTARTS: restarts}
        for column in Column:
            self._cells[row + column] = values.get(column, 0)

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

    def served(self, number: int) -> bool:
        """Whether a front has served since its start: the first beat may be that of `expect`."""
        return self._beats[number] > 1

    def state(self, number: int) -> FrontState:
        """What a front does."""
        if self._silence_s[number] > SILENT_S:
            return FrontState.SILENT
        return FrontState.SERVING if self.served(number) else FrontState.STARTING

    def reports(self) -> list[dict[str, object]]:
        """Of each front its number, its state, and how often it was started anew."""
        restarts = self._table.column(Column.RESTARTS)
        return [
            {"front": number, "state": self.state(number), "restarts": restarts[number]}
            for number in range(len(restarts))
        ]
