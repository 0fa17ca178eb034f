"""Calls that cannot be captured are computed as they come."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from beheld.models.call_graphs import CallGraphs


class _Graphs(CallGraphs):
    """Captures nothing: `fails` says what happens instead."""

    def __init__(self, fails: dict[Any, Exception]) -> None:
        super().__init__()
        self.fails = fails
        self.tried: list[Any] = []

    def _capture(self, inputs: Any, compute: Any) -> Any:
        size = len(inputs["x"])
        self.tried.append(size)
        raise self.fails[size]


def call(graphs: CallGraphs, size: int, kind: str = "image") -> None:
    x = torch.full((size,), 2.0)
    out = graphs(kind, size, {"x": x}, lambda given: given["x"] * 3)
    assert out.tolist() == [6.0] * size


def test_a_call_that_reads_from_the_device_is_tried_once() -> None:
    graphs = _Graphs({4: RuntimeError("operation not permitted when stream is capturing"), 5: RuntimeError("no")})
    for _ in range(12):
        call(graphs, 4)
        call(graphs, 5)
    assert graphs.tried == [4], "what holds for one size holds for all of its kind"


def test_without_memory_for_one_size_others_are_tried() -> None:
    graphs = _Graphs({4: torch.OutOfMemoryError("out of memory"), 5: torch.OutOfMemoryError("out of memory")})
    for _ in range(12):
        call(graphs, 4)
        call(graphs, 5)
    assert graphs.tried == [4, 5]


def test_an_error_of_the_call_itself_is_told() -> None:
    graphs = _Graphs({4: ValueError("not the device's")})
    for _ in range(3):
        call(graphs, 4)
    with pytest.raises(ValueError, match="not the device's"):
        call(graphs, 4)
