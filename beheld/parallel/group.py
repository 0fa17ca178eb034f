"""The group of ranks that share a model, and its collectives: gloo between CPUs, NCCL between GPUs.

The groups are made without torch.distributed's default group, so a caller's own use of that is not disturbed. Ranks
find each other through a file in a folder that only this user can read, and connect on the loopback interface alone.
"""

from __future__ import annotations

import ctypes
import datetime
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_LOOPBACK = "127.0.0.1"
# The watchdog of the executor notices ranks that are gone or stuck; this limit is only the last resort, because loading
# weights may take one rank minutes longer than another.
_LIMIT = datetime.timedelta(minutes=60)
_CONNECT = datetime.timedelta(seconds=60)
_LEAVE_S = 5.0

# What NCCL reads when a group is made, unless the user has set it: it connects on the loopback interface, leaves NVLink
# multicast off, and does not end this process when another rank is gone, which the watchdog of the executor notices.
_NCCL = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}

_groups: dict[int, RankGroup] = {}


class RankGroup:
    """One rank's view of the group. All ranks call the same methods in the same order, one thread each.

    Args:
        rank, size: which rank this process is, and how many there are.
        folder: a folder for this group alone, readable by this user only.
        backend: what sums and gathers tensors of the model's device, "gloo" or "nccl".
        ready: called before this rank connects to the others, at its first collective. Connecting cannot be
            interrupted, so it returns when all ranks are about to connect, or raises.

    Attributes:
        number: names the group in compiled code.
        entered: collectives that this rank has begun, since the start.
        waits_since: when it began the one that it waits in, by time.monotonic; None if it waits in none.
    """

    def __init__(self, rank: int, size: int, folder: Path, backend: str, ready: Callable[[], None]) -> None:
        self.rank, self.size = rank, size
        self.entered = 0
        self.waits_since: float | None = None
        self._folder, self._backend, self._ready = folder, backend, ready
        self._host: Any = None
        self._device: Any = None
        self.number = max(_groups, default=0) + 1
        _groups[self.number] = self

    def _connect(self) -> None:
        from torch import distributed
        from torch._C._distributed_c10d import AllgatherOptions

        # Its stubs lack what is used here.
        dist: Any = distributed

        self._ready()
        store = dist.FileStore(str(self._folder / "ranks"), self.size)
        store.set_timeout(_CONNECT)
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
        options._timeout = _LIMIT
        self._host = dist.ProcessGroupGloo(dist.PrefixStore("host", store), self.rank, self.size, options)
        self._device = self._host
        if self._backend == "nccl":
            for name, value in _NCCL.items():
                os.environ.setdefault(name, value)
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = _LIMIT
            self._device = dist.ProcessGroupNCCL(dist.PrefixStore("device", store), self.rank, self.size, nccl)
        self._sum, self._least, self._gather, self._cast = (
            dist.AllreduceOptions(),
            dist.AllreduceOptions(),
            AllgatherOptions(),
            dist.BroadcastOptions(),
        )
        self._least.reduceOp = dist.ReduceOp.MIN
        # On the caller's stream, so that a CUDA graph captured on it holds the collective.
        for each in (self._sum, self._gather, self._cast):
            each.asyncOp = False

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        if self._host is None:
            self._connect()
        self.entered += 1
        self.waits_since = time.monotonic()
        try:
            yield
        finally:
            self.waits_since = None

    def sum_(self, x: Tensor) -> None:
        """Replace `x`, in place, by its sum over all ranks, which has the same bits on each."""
        if not x.numel():
            return
        dense = x.contiguous()
        with self._waiting():
            _finish(self._device.allreduce([dense], self._sum))
        if dense.data_ptr() != x.data_ptr():
            x.copy_(dense)

    def joined(self, x: Tensor) -> Tensor:
        """Return all ranks' `x` (..., N), one after another along the last dimension: (..., N * size)."""
        sizes = (*x.shape[:-1], self.size * x.shape[-1])
        if not x.numel():
            return x.new_empty(sizes)
        dense = x.contiguous()
        out = dense.new_empty(self.size * dense.numel())
        with self._waiting():
            _finish(self._device._allgather_base(out, dense.view(-1), self._gather))
        return out.view(self.size, *dense.shape).movedim(0, -2).reshape(sizes)

    def copy_from(self, x: Tensor, source: int) -> None:
        """Overwrite a contiguous `x` by that of the rank `source`."""
        if not x.numel():
            return
        with self._waiting():
            self._cast.rootRank = source
            _finish(self._device.broadcast([x], self._cast))

    def least(self, values: Sequence[int]) -> list[int]:
        """Return, for each place, the smallest value of all ranks; the host waits for them."""
        tensor = torch.tensor(list(values), dtype=torch.int64)
        with self._waiting():
            _finish(self._host.allreduce([tensor], self._least))
        found: list[int] = tensor.tolist()
        return found

    def abort(self) -> None:
        """End what waits on the device for ranks that are gone; any thread may call it."""
        device = self._device
        if device is not None and device is not self._host:
            device.abort()

    def close(self) -> None:
        """Leave the group, once no CUDA graph holds a collective of it any more.

        NCCL waits for such graphs without end. If one is left after all, the communicator stays, and nothing waits.
        """
        _groups.pop(self.number, None)
        device, host = self._device, self._host
        self._device = self._host = None
        if device is None or device is host:
            return
        ending = threading.Thread(target=device.abort, name="beheld-leave", daemon=True)
        ending.start()
        ending.join(_LEAVE_S)
        if ending.is_alive():
            # Its destructor would wait as well, at the latest when the interpreter ends.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(device))


def _finish(work: Any) -> None:
    """Wait for a collective: the host, or on a GPU its stream. Without asyncOp there may be nothing to wait for."""
    if work is not None:
        work.wait()


def sum_over_ranks_(x: Tensor, group: RankGroup) -> Tensor:
    """Sum `x` over the ranks, in place, in compiled code as well; returns it."""
    if torch.compiler.is_compiling():
        torch.ops.beheld.rank_sum_(x, group.number)
    else:
        group.sum_(x)
    return x


def joined_over_ranks(x: Tensor, group: RankGroup) -> Tensor:
    """Return the ranks' `x` along the last dimension, in compiled code as well."""
    if torch.compiler.is_compiling():
        made: Tensor = torch.ops.beheld.rank_join(x, group.number, group.size)
        return made
    return group.joined(x)


def _sum(x: Tensor, group: int) -> None:
    _groups[group].sum_(x)


def _sum_shape(x: Tensor, group: int) -> None:
    """Describe the result for torch.compile: none."""


def _join(x: Tensor, group: int, size: int) -> Tensor:
    return _groups[group].joined(x)


def _join_shape(x: Tensor, group: int, size: int) -> Tensor:
    """Describe the result for torch.compile."""
    return x.new_empty((*x.shape[:-1], x.shape[-1] * size))


_library = torch.library.Library("beheld", "FRAGMENT")
_library.define("rank_sum_(Tensor(a!) x, int group) -> ()")
_library.impl("rank_sum_", _sum, "CompositeExplicitAutograd")
torch.library.register_fake("beheld::rank_sum_", _sum_shape, lib=_library)
_library.define("rank_join(Tensor x, int group, int size) -> Tensor")
_library.impl("rank_join", _join, "CompositeExplicitAutograd")
torch.library.register_fake("beheld::rank_join", _join_shape, lib=_library)
