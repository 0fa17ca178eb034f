"""What a trace says is told apart by what launched it."""

from __future__ import annotations

from typing import Any

from benchmarks.causes import STAGES, causes, methods


def mark(stage: str, start: float, end: float) -> dict[str, Any]:
    return {"cat": "user_annotation", "name": f"stage:{stage}", "ts": start, "dur": end - start}


def work(start: float, end: float, correlation: int, name: str = "product") -> dict[str, Any]:
    return {"cat": "kernel", "name": name, "ts": start, "dur": end - start, "args": {"correlation": correlation}}


def launch(when: float, correlation: int) -> dict[str, Any]:
    return {"cat": "cuda_runtime", "name": "launch", "ts": when, "dur": 1, "args": {"correlation": correlation}}


def test_work_is_counted_where_it_was_launched() -> None:
    """A graph's kernels all bear the number of its one launch; what runs beside another counts for what is left."""
    events = [
        mark("prefill", 0, 100),
        mark("decode", 200, 300),
        mark("sampling", 290, 295),
        launch(50, 1),
        launch(250, 2),
        launch(292, 3),
        launch(150, 4),
        work(1000, 3000, 1),
        work(3000, 4000, 2),
        work(4000, 6000, 2, "attention"),
        work(5000, 8000, 3),
        work(9000, 9500, 4, "copy"),
        work(9500, 9600, 99, "unknown"),
    ]
    by_stage, by_kernel = causes(events)
    assert by_stage == {"prefill": 2.0, "decode": 3.0, "sampling": 2.0, "other": 0.6}
    assert by_kernel == {"product": 5.0, "attention": 2.0, "copy": 0.5, "unknown": 0.1}


def test_every_stage_has_its_methods() -> None:
    found = methods()
    assert all(callable(getattr(owner, name)) for owner, name, _ in found)
    assert {stage for *_, stage in found} == set(STAGES)
