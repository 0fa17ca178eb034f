"""How far ranks are in their steps: what each says of itself, and what the first one makes of it."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from torch import nn

from beheld.executor.wire import Beat
from beheld.runner.device_wait import waits_since
from beheld.utils import unbounded_work

# While one of these is at work, a thread compiles. Others of their packages are there while compiled code runs, too.
_COMPILERS = ("torch._dynamo.convert_frame", "torch._inductor.compile_fx", "triton.compiler.", "llvmlite.")
# Or it imports.
_LONG = (*_COMPILERS, "importlib._bootstrap", "_frozen_importlib")
# What these call is the step; what has called them is not.
_OUTSIDE = ("beheld.executor.multi", "beheld.executor.rank")


class StepClock:
    """What a rank's thread of steps is at; any other thread may ask.

    Args:
        group: of the ranks, as this one sees it.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._steps = self._layers = 0
        # The thread, while it is in a step.
        self._thread: int | None = None
        self._unbounded = False

    def count(self, layers: Iterable[nn.Module]) -> None:
        """Count from now on how often one of these begins."""

        def begin(*unused: Any) -> None:
            self._layers += 1

        for layer in layers:
            layer.register_forward_pre_hook(begin)

    @contextmanager
    def step(self, *, unbounded: bool = False) -> Iterator[None]:
        """Within the block, this thread carries out a step, or a part of one.

        Args:
            unbounded: nothing says how much there is to compute.
        """
        before = self._thread, self._unbounded
        self._thread, self._unbounded = threading.get_ident(), unbounded
        self._steps += 1
        try:
            yield
        finally:
            self._thread, self._unbounded = before

    def beat(self) -> Beat:
        """Return what the other ranks are to know."""
        thread, collective = self._thread, self._group.waits_since
        device = None if thread is None else waits_since(thread)
        now = time.monotonic()
        works = thread is not None and collective is None and device is None
        return Beat(
            self._group.entered,
            self._steps,
            None if collective is None else now - collective,
            None if device is None else now - device,
            works,
            self._layers,
            works and (self._unbounded or (thread is not None and (unbounded_work.runs(thread) or _prepares(thread)))),
        )


def _prepares(thread: int) -> bool:
    """Whether a thread in a step compiles or imports."""
    frame: FrameType | None = sys._current_frames().get(thread)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.startswith(_LONG):
            return True
        if module in _OUTSIDE:
            return False
        frame = frame.f_back
    return False


@dataclass(eq=False)
class RankProgress:
    """How far a rank is, as far as the first one knows; times by the first one's time.monotonic.

    Attributes:
        entered: how many collectives it has begun; that number last changed at `entered_at`.
        steps, layers: how many steps it has begun, and layers.
        waits_since: since when it waits in a collective; None if it does not.
        device_since: since when it waits for its device; None if it does not.
        works_since: since when its host computes without beginning a step, a layer or a collective; None if it does
            not.
        unbounded: its host computes what may take long whatever the step is.
        worked_at: when its host last computed.
    """

    rank: int
    entered: int = 0
    steps: int = 0
    layers: int = 0
    waits_since: float | None = None
    device_since: float | None = None
    works_since: float | None = None
    unbounded: bool = False
    entered_at: float = field(default_factory=time.monotonic)
    worked_at: float = field(default_factory=time.monotonic)

    def note(self, beat: Beat, now: float) -> None:
        """Take what the rank says."""
        begun = beat.entered, beat.steps, beat.layers
        moved = begun != (self.entered, self.steps, self.layers)
        if beat.entered != self.entered:
            self.entered_at = now
        self.entered, self.steps, self.layers = begun
        self.waits_since = None if beat.waits_s is None else now - beat.waits_s
        self.device_since = None if beat.device_s is None else now - beat.device_s
        # What comes after such work has its own time.
        moved, self.unbounded = moved or self.unbounded != beat.unbounded, beat.unbounded
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
