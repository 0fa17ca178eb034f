"""CUDA graphs of tower calls whose sizes recur, because the host takes longer to launch them than the device to run.

Shapes: E embeddings, H their width.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from beheld.core.errors import first_line
from beheld.platform.platform import Graph, Graphs
from beheld.utils.frames import clear_frames
from beheld.utils.log import get_logger

logger = get_logger(__name__)

# The number of sizes with a kept graph, and of sizes remembered as seen.
_KEPT, _REMEMBERED = 16, 256
# The largest total of kept calls' inputs and outputs; their intermediates share one memory pool.
KEPT_BYTES = 1 << 29
# A call is captured when its sizes come for the fourth time: capturing takes a tenth of a second, while everything
# waits, and under load the number of images in a step varies at random.
_OFTEN = 3


@dataclass(frozen=True, eq=False)
class _Captured:
    graph: Graph
    inputs: dict[str, Tensor]
    out_EH: Tensor

    @property
    def num_bytes(self) -> int:
        """The memory that this call alone holds."""
        return self.out_EH.nbytes + sum(tensor.nbytes for tensor in self.inputs.values())


class CallGraphs:
    """Runs calls, and replays those whose sizes were seen before.

    A call may be captured only if equal tensors give equal results. If a call reads anything back from the device,
    which no graph can hold, no call of its kind is captured. The call before the one to be captured detects this,
    because a failed capture leaves more state behind than a call does.
    """

    def __init__(self, graphs: Graphs) -> None:
        self._graphs = graphs
        self._captured: OrderedDict[Hashable, _Captured] = OrderedDict()
        self._seen: OrderedDict[Hashable, int] = OrderedDict()
        self._refused: set[str] = set()
        self._pool: Any = None
        self._stream: Any = None

    def __call__(
        self,
        kind: str,
        sizes: Hashable,
        inputs: Mapping[str, Tensor],
        compute: Callable[[Mapping[str, Tensor]], Tensor],
    ) -> Tensor:
        """Compute `compute(inputs)` -> (E, H), by a graph if there is one.

        Args:
            kind: calls of one kind run the same program.
            sizes: everything that determines what is launched.
            inputs: tensors on the device.
        """
        found = self._captured.get(sizes)
        if kind in self._refused or (found is None and sum(t.nbytes for t in inputs.values()) > KEPT_BYTES // 4):
            return compute(inputs)
        if found is None and self._seen.get(sizes, 0) < _OFTEN:
            self._remember(sizes)
            return self._watched(kind, inputs, compute) if self._seen[sizes] == _OFTEN else compute(inputs)
        if found is None:
            found = self._try(kind, sizes, inputs, compute)
            if found is None:
                return compute(inputs)
            self._keep(sizes, found)
        self._captured.move_to_end(sizes)
        for name, tensor in inputs.items():
            found.inputs[name].copy_(tensor)
        found.graph.replay()
        # The graphs share their memory, so the next one may overwrite the output.
        return found.out_EH.clone()

    def _watched(
        self, kind: str, inputs: Mapping[str, Tensor], compute: Callable[[Mapping[str, Tensor]], Tensor]
    ) -> Tensor:
        """Compute a call and detect whether it reads anything back; if so, no call of its kind is captured."""
        try:
            with self._graphs.refusing_to_wait():
                return compute(inputs)
        except RuntimeError as error:
            if not self._graphs.waited(error):
                raise
            clear_frames(error)
            logger.info("Calls of the %s tower are not captured: they wait for the device.", kind)
            self._refused.add(kind)
        return compute(inputs)

    def _try(
        self,
        kind: str,
        sizes: Hashable,
        inputs: Mapping[str, Tensor],
        compute: Callable[[Mapping[str, Tensor]], Tensor],
    ) -> _Captured | None:
        """Capture a call. None if that fails: it is not tried again soon, and the attempt holds no memory.

        A graph holds the call's memory for as long as it lives; without room for that, there may be room for the call
        itself.
        """
        try:
            return self._capture(inputs, compute)
        except torch.OutOfMemoryError as error:
            clear_frames(error)
            logger.info("Not enough memory to capture a call of the %s tower.", kind)
            # Forget that these sizes were seen: when they have come often again, there may be room.
            self._seen.pop(sizes, None)
        except RuntimeError as error:
            clear_frames(error)
            logger.info("Calls of the %s tower are not captured: %s", kind, first_line(error))
            self._refused.add(kind)
        # Later graphs use a new pool; the old pool belongs to the graphs captured in it.
        self._pool = None
        return None

    def _keep(self, sizes: Hashable, captured: _Captured) -> None:
        """Keep a graph, and drop the least recently used ones while the rest is too large."""
        room = KEPT_BYTES - captured.num_bytes
        while len(self._captured) >= _KEPT or sum(each.num_bytes for each in self._captured.values()) > max(0, room):
            self._captured.popitem(last=False)
        self._captured[sizes] = captured

    def _remember(self, sizes: Hashable) -> None:
        self._seen[sizes] = self._seen.get(sizes, 0) + 1
        self._seen.move_to_end(sizes)
        if len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)

    def _capture(self, inputs: Mapping[str, Tensor], compute: Callable[[Mapping[str, Tensor]], Tensor]) -> _Captured:
        kept = {name: tensor.clone() for name, tensor in inputs.items()}
        if self._stream is None:
            self._stream = self._graphs.new_stream()
        if self._pool is None:
            self._pool = self._graphs.new_pool()
        with self._graphs.on(self._stream), self._graphs.recording(self._pool, relaxed=False) as graph:
            out_EH = compute(kept)
        return _Captured(graph, kept, out_EH)
