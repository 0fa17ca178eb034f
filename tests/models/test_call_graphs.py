"""Which tower calls are captured, and that what cannot be captured is computed; graphs are stand-ins on a CPU."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from beheld.models import call_graphs
from beheld.models.call_graphs import CallGraphs, _Captured


class StandIn:
    """Computes again, from the inputs that lie in place, into the place of the output."""

    def __init__(self, captured: list[Tensor], compute: Callable[[Mapping[str, Tensor]], Tensor]) -> None:
        self._captured, self._compute = captured, compute
        self.inputs: dict[str, Tensor] = {}

    def replay(self) -> None:
        self._captured[0].copy_(self._compute(self.inputs))


class OnCPU(CallGraphs):
    """Captures stand-ins, unless it is told to fail."""

    def __init__(self) -> None:
        super().__init__()
        self.captures = 0
        self.failure: Exception | None = None
        self.wasted: list[weakref.ref[Tensor]] = []

    def _capture(self, inputs: Mapping[str, Tensor], compute: Callable[[Mapping[str, Tensor]], Tensor]) -> _Captured:
        self.captures += 1
        kept = {name: tensor.clone() for name, tensor in inputs.items()}
        self.wasted.append(weakref.ref(kept["x"]))
        out_EH = compute(kept)
        if self.failure is not None:
            raise self.failure
        graph: Any = StandIn([out_EH], compute)
        graph.inputs = kept
        return _Captured(graph, kept, out_EH)


def doubled(inputs: Mapping[str, Tensor]) -> Tensor:
    return inputs["x"] * 2


def call(graphs: CallGraphs, value: float, sizes: Any = 4, kind: str = "image") -> list[float]:
    return graphs(kind, sizes, {"x": torch.full((2, 1), value)}, doubled).flatten().tolist()


def test_sizes_that_come_often_are_captured_once_and_replayed() -> None:
    graphs = OnCPU()
    found = [call(graphs, float(n)) for n in range(8)]
    assert found == [[2.0 * n] * 2 for n in range(8)]
    assert graphs.captures == 1
    call(graphs, 1.0, sizes=5)
    assert graphs.captures == 1, "other sizes have not come often"


def test_an_answer_stays_when_the_next_is_replayed() -> None:
    graphs = OnCPU()
    for n in range(4):
        call(graphs, float(n))
    first = graphs("image", 4, {"x": torch.full((2, 1), 5.0)}, doubled)
    call(graphs, 6.0)
    assert first.tolist() == [[10.0], [10.0]]


def test_a_kind_that_cannot_be_captured_is_computed_for_ever_after() -> None:
    graphs = OnCPU()
    graphs.failure = RuntimeError("operation not permitted when stream is capturing")
    assert [call(graphs, float(n)) for n in range(8)] == [[2.0 * n] * 2 for n in range(8)]
    assert graphs.captures == 1
    graphs.failure = None
    for n in range(8):
        call(graphs, float(n), sizes=5)
    assert graphs.captures == 1, "of any sizes"
    for n in range(8):
        call(graphs, float(n), kind="video", sizes=6)
    assert graphs.captures == 2, "other kinds are"


def test_without_memory_for_a_graph_calls_are_computed_and_a_graph_is_made_later() -> None:
    graphs = OnCPU()
    graphs.failure = torch.OutOfMemoryError("CUDA out of memory.")
    assert [call(graphs, float(n)) for n in range(8)] == [[2.0 * n] * 2 for n in range(8)]
    assert graphs.captures == 2, "not at each call"
    graphs.failure = None
    assert [call(graphs, float(n)) for n in range(8)] == [[2.0 * n] * 2 for n in range(8)]
    assert graphs.captures == 3


@pytest.mark.parametrize("failure", [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("not permitted")])
def test_what_a_failed_capture_took_is_free_when_the_call_is_computed(failure: Exception) -> None:
    graphs, alive = OnCPU(), []
    graphs.failure = failure

    def watching(inputs: Mapping[str, Tensor]) -> Tensor:
        alive.extend(ref() is not None for ref in graphs.wasted if inputs["x"] is not ref())
        return doubled(inputs)

    for _ in range(call_graphs._OFTEN + 1):
        graphs("image", 4, {"x": torch.zeros(2, 1)}, watching)
    assert alive == [False]


def test_few_graphs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_graphs, "_KEPT", 2)
    graphs = OnCPU()
    for sizes in (1, 2, 3):
        for n in range(5):
            assert call(graphs, float(n), sizes=sizes) == [2.0 * n] * 2
    assert list(graphs._captured) == [2, 3]
