"""CUDA graphs of tower calls: what comes again in the same sizes is captured, since launching it takes the host longer.

Shapes: E embeddings, H their width.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from beheld.utils.frames import clear_frames
from beheld.utils.log import get_logger

logger = get_logger(__name__)

# Sizes of calls that are kept, and those that are remembered as having come before.
_KEPT, _REMEMBERED = 16, 256
# A call is captured when its sizes come for the fourth time: capturing takes a tenth of a second, while all wait, and
# in a crowd the number of pictures of a step is a matter of chance.
_OFTEN = 3


@contextmanager
def recording(graph: torch.cuda.CUDAGraph, pool: Any, mode: str) -> Iterator[None]:
    """Within the block, what is launched on the current stream is captured; an error in it is the one that is told."""
    graph.capture_begin(pool=pool, capture_error_mode=mode)
    try:
        yield
    except BaseException:
        with suppress(RuntimeError):
            graph.capture_end()
        raise
    graph.capture_end()


@dataclass(frozen=True, eq=False)
class _Captured:
    graph: torch.cuda.CUDAGraph
    inputs: dict[str, Tensor]
    out_EH: Tensor


class CallGraphs:
    """Runs calls, and replays those whose sizes were seen before.

    A call may be captured only if it gives the same for the same tensors. If it reads anything back from the device,
    which no graph can hold, it and all others of its kind are computed as they come.
    """

    def __init__(self) -> None:
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
        """compute(inputs) -> (E, H).

        Args:
            kind: calls of one kind run the same program.
            sizes: all that decides what is launched.
            inputs: tensors on the device.
        """
        found = self._captured.get(sizes)
        if kind in self._refused:
            return compute(inputs)
        if found is None and self._seen.get(sizes, 0) < _OFTEN:
            self._remember(sizes)
            return compute(inputs)
        if found is None:
            found = self._try(kind, sizes, inputs, compute)
            if found is None:
                return compute(inputs)
            self._captured[sizes] = found
            if len(self._captured) > _KEPT:
                self._captured.popitem(last=False)
        self._captured.move_to_end(sizes)
        for name, tensor in inputs.items():
            found.inputs[name].copy_(tensor)
        found.graph.replay()
        # The graphs share their memory: the next one may write here.
        return found.out_EH.clone()

    def _try(
        self,
        kind: str,
        sizes: Hashable,
        inputs: Mapping[str, Tensor],
        compute: Callable[[Mapping[str, Tensor]], Tensor],
    ) -> _Captured | None:
        """Capture a call; None if it cannot be, and then it is not tried again soon, and the attempt holds no memory.

        A graph keeps what the call takes for as long as it lives: where there is no room for that, there may be for the
        call itself.
        """
        try:
            return self._capture(inputs, compute)
        except torch.OutOfMemoryError as error:
            clear_frames(error)
            logger.info("There is no memory for a graph of a call of the %s tower.", kind)
            # As if they had never come: by the time they have come so often again, there may be room.
            self._seen.pop(sizes, None)
        except RuntimeError as error:
            clear_frames(error)
            logger.info("Calls of the %s tower are not captured: %s", kind, str(error).splitlines()[0])
            self._refused.add(kind)
        return None

    def _remember(self, sizes: Hashable) -> None:
        self._seen[sizes] = self._seen.get(sizes, 0) + 1
        self._seen.move_to_end(sizes)
        if len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)

    def _capture(self, inputs: Mapping[str, Tensor], compute: Callable[[Mapping[str, Tensor]], Tensor]) -> _Captured:
        kept = {name: tensor.clone() for name, tensor in inputs.items()}
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        # `torch.cuda.graph` would give all cached memory back to the driver, while requests run.
        with torch.cuda.stream(self._stream), recording(graph, self._pool, "thread_local"):
            out_EH = compute(kept)
        return _Captured(graph, kept, out_EH)
