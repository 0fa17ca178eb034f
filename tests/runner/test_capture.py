"""A ladder of steps is captured in order, on a device that records and computes nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from beheld.platform.platform import Graph
from beheld.runner.capture import NotCapturedError, capture
from tests.platform.stand_in import StandIn


class Replayed:
    """A graph that notes its replays."""

    def __init__(self, log: list[str]) -> None:
        self._log, self.size = log, 0

    def replay(self) -> None:
        self._log.append(f"replay {self.size}")


class Recorder:
    """Notes what is done between the begin and the end of a recording."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def new_pool(self) -> Any:
        return "pool"

    def new_stream(self) -> Any:
        return "stream"

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[Any]:
        self.log.append("on")
        yield
        self.log.append("off")

    @contextlib.contextmanager
    def recording(self, pool: Any, *, relaxed: bool) -> Iterator[Graph]:
        assert (pool, relaxed) == ("pool", True)
        self.log.append("begin")
        yield Replayed(self.log)
        self.log.append("end")

    def refusing_to_wait(self) -> contextlib.AbstractContextManager[None]:
        raise AssertionError("nothing is watched")

    def waited(self, error: RuntimeError) -> bool:
        raise AssertionError("nothing is watched")


class Device(StandIn):
    """A stand-in whose launches are recorded."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.graphs = Recorder(log)  # type: ignore[assignment]

    def empty_cache(self) -> None:
        self.log.append("emptied")


def test_first_sizes_run_once_before_they_are_recorded_and_long_ones_are_not_tried() -> None:
    log: list[str] = []

    def step(size: int) -> str:
        log.append(f"step {size}")
        return f"out {size}"

    made = capture(
        [8, 4, 2],
        step,
        platform=Device(log),
        before=lambda size: log.append(f"blank {size}"),
        first=[2],
        long=[8],
        show_progress=False,
        name="steps",
    )
    assert {size: out for size, (_, out) in made.items()} == {8: "out 8", 4: "out 4", 2: "out 2"}
    assert log == [
        *("on", "blank 8", "step 8", "begin", "step 8", "end"),
        *("blank 4", "begin", "step 4", "end", "replay 0"),
        *("blank 2", "step 2", "begin", "step 2", "end", "replay 0", "off", "emptied"),
    ]


def test_a_step_that_no_graph_holds_says_why() -> None:
    calls: list[int] = []

    def step(size: int) -> None:
        calls.append(size)
        if len(calls) > 1:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

    with pytest.raises(NotCapturedError, match=r"^operation not permitted when stream is capturing$"):
        capture([4, 2], step, platform=Device([]), show_progress=False, name="steps")
    assert calls == [4, 4]
