"""How far ranks are in their steps: what each says of itself, and what the first one makes of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from beheld.executor.wire import Beat
from beheld.runner.device_wait import waits_since


class StepClock:
    """What a rank's thread of steps is at; any other thread may ask.

    Args:
        group: of the ranks, as this one sees it.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._steps = 0
        # The thread, while it is in a step.
        self._thread: int | None = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Within the block, this thread carries out a step, or a part of one."""
        before, self._thread = self._thread, threading.get_ident()
        self._steps += 1
        try:
            yield
        finally:
            self._thread = before

    def beat(self) -> Beat:
        """Return what the other ranks are to know."""
        thread, collective = self._thread, self._group.waits_since
        device = None if thread is None else waits_since(thread)
        now = time.monotonic()
        return Beat(
            self._group.entered,
            self._steps,
            None if collective is None else now - collective,
            None if device is None else now - device,
            thread is not None and collective is None and device is None,
        )


@dataclass(eq=False)
class RankProgress:
    """How far a rank is, as far as the first one knows; times by the first one's time.monotonic.

    Attributes:
        entered: how many collectives it has begun; that number last changed at `entered_at`.
        steps: how many steps it has begun.
        waits_since: since when it waits in a collective; None if it does not.
        device_since: since when it waits for its device; None if it does not.
        works_since: since when its host computes, in one step and without beginning a collective; None if it does not.
        worked_at: when its host last computed.
    """

    rank: int
    entered: int = 0
    steps: int = 0
    waits_since: float | None = None
    device_since: float | None = None
    works_since: float | None = None
    entered_at: float = field(default_factory=time.monotonic)
    worked_at: float = field(default_factory=time.monotonic)

    def note(self, beat: Beat, now: float) -> None:
        """Take what the rank says."""
        moved = (beat.entered, beat.steps) != (self.entered, self.steps)
        if beat.entered != self.entered:
            self.entered_at = now
        self.entered, self.steps = beat.entered, beat.steps
        self.waits_since = None if beat.waits_s is None else now - beat.waits_s
        self.device_since = None if beat.device_s is None else now - beat.device_s
        if not beat.works:
            self.works_since = None
            return
        self.worked_at = now
        if moved or self.works_since is None:
            self.works_since = now

    def excuse(self, now: float) -> None:
        """Count from now on: until now nobody listened to what the rank says."""
        self.entered_at = self.worked_at = now
        if self.works_since is not None:
            self.works_since = now
