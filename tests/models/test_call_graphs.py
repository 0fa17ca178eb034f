"""Which tower calls are captured, and that what cannot be captured is computed; graphs are stand-ins on a CPU."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from beheld.models import call_graphs
from beheld.models.call_graphs import CallGraphs, _Captured
from beheld.platform import cuda


class Device:
    """What a GPU and PyTorch's allocators for it remember, in the two ways of torch 2.11 ("held") and later."""

    def __init__(self, ends: str) -> None:
        self.ends = ends
        self.waiting: int | str = 1
        self.capturing = self.broken = False
        self.recording: set[Any] = set()
        self.pinned_recording: set[Any] = set()
        self.users: dict[Any, int] = {}
        self.handles = itertools.count(1)

    def read(self) -> None:
        """What `.tolist()` does."""
        if self.capturing:
            self.broken = True
            raise RuntimeError("operation not permitted when stream is capturing")
        if self.waiting == "error":
            raise RuntimeError("called a synchronizing CUDA operation")

    def end(self, device: int, pool: Any) -> None:
        if pool not in self.recording:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.recording.remove(pool)

    def release(self, device: int, pool: Any) -> None:
        self.users[pool] -= 1
        assert self.users[pool] >= 0


class Graph:
    """A torch.cuda.CUDAGraph that replays nothing."""

    device: Device

    def __init__(self) -> None:
        self._pool: Any = None

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        device = self.device
        assert device.users.get(pool) != 0, "a pool that no graph holds is gone"
        device.users[pool] = device.users.get(pool, 0) + 1
        for recording in (device.recording, device.pinned_recording):
            if pool in recording:
                raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
            recording.add(pool)
        self._pool, device.capturing = pool, True

    def capture_end(self) -> None:
        device = self.device
        broken, device.broken, device.capturing = device.broken, False, False
        if broken and device.ends == "held":
            pool, self._pool = self._pool, None
            raise RuntimeError(f"capture invalidated, pool {pool} goes on recording")
        device.end(0, self._pool)
        device.pinned_recording.remove(self._pool)
        if broken:
            raise RuntimeError("capture invalidated")

    def reset(self) -> None:
        if self._pool is not None:
            self.device.release(0, self._pool)
            self._pool = None

    def replay(self) -> None:
        assert self._pool is not None


@pytest.fixture(autouse=True, params=["held", "ended"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device(request.param)
    monkeypatch.setattr(Graph, "device", made, raising=False)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, next(made.handles)))
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", made.end, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", made.release, raising=False)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: made.waiting)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: setattr(made, "waiting", mode))
    monkeypatch.setattr(cuda, "_abandoned", [])
    return made


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
        super().__init__(cuda.CudaGraphs())
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


def reading(device: Device) -> Callable[[Mapping[str, Tensor]], Tensor]:
    def compute(inputs: Mapping[str, Tensor]) -> Tensor:
        device.read()
        return doubled(inputs)

    return compute


def test_a_call_that_reads_back_is_found_out_without_a_capture(device: Device) -> None:
    graphs = CallGraphs(cuda.CudaGraphs())
    for n in range(8):
        assert graphs("image", 4, {"x": torch.full((1, 1), float(n))}, reading(device)).tolist() == [[2.0 * n]]
        assert device.waiting == 1, "as it was before"
    assert not device.users, "no capture was begun"
    for _ in range(5):
        graphs("audio", 5, {"x": torch.zeros(1, 1)}, doubled)
    assert list(graphs._captured) == [5]


def test_a_call_that_fails_is_not_taken_for_one_that_reads_back(device: Device) -> None:
    def failing(inputs: Mapping[str, Tensor]) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    graphs = CallGraphs(cuda.CudaGraphs())
    for _ in range(2):
        call(graphs, 1.0)
    with pytest.raises(torch.OutOfMemoryError):
        graphs("image", 4, {"x": torch.zeros(2, 1)}, failing)
    assert device.waiting == 1
    call(graphs, 1.0)
    assert list(graphs._captured) == [4]


def test_after_a_capture_that_failed_nothing_records_and_other_kinds_are_captured(device: Device) -> None:
    """Something waits in a way that was not found out before."""
    graphs = CallGraphs(cuda.CudaGraphs())
    for _ in range(5):
        call(graphs, 1.0, sizes=3, kind="video")

    def breaking(inputs: Mapping[str, Tensor]) -> Tensor:
        if device.capturing:
            device.read()
        return doubled(inputs)

    for n in range(6):
        assert graphs("image", 4, {"x": torch.full((1, 1), float(n))}, breaking).tolist() == [[2.0 * n]]
        assert not device.recording
    for _ in range(5):
        call(graphs, 1.0, sizes=5, kind="audio")
    assert list(graphs._captured) == [3, 5]
    assert list(device.users.values()) == [1, 1], "what the failed one held is free"
    # Its streams are still asked for by the allocator of pinned memory.
    assert len(cuda._abandoned) == len(device.pinned_recording) == (device.ends == "held")


def test_a_capture_that_does_not_begin_leaves_nothing_behind(device: Device) -> None:
    device.pinned_recording.add((0, 7))
    with pytest.raises(RuntimeError, match="already recording"), cuda.CudaGraphs().recording((0, 7), relaxed=True):
        pytest.fail("nothing is captured")
    assert not device.recording


def test_what_graphs_keep_is_bounded_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call takes in 8 bytes and gives 8."""
    monkeypatch.setattr(call_graphs, "KEPT_BYTES", 40)
    graphs = OnCPU()
    for sizes in (1, 2, 1, 3):
        for n in range(5):
            assert call(graphs, float(n), sizes=sizes) == [2.0 * n] * 2
    assert list(graphs._captured) == [1, 3], "the one that was used least lately is gone"
    assert sum(each.num_bytes for each in graphs._captured.values()) == 32
    for _ in range(6):
        graphs("image", 9, {"x": torch.zeros(3, 1)}, doubled)
    assert 9 not in graphs._captured, "one that would take much of it alone"
