"""Sums of tensors over the GPUs of one host, by writing to one another's memory; see peer_sum_kernel.py."""

from __future__ import annotations

import hashlib
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from beheld.platform.registry import platform_of

_TYPES = (torch.bfloat16, torch.float16, torch.float32)
# The trial sum takes milliseconds once its kernel is compiled; other ranks may still compile theirs.
_TRIAL_S = 120.0
# A rank without such memory sends as many bytes in a handle's place.
_HANDLE_BYTES = 64

_HOST_BYTES = 16


def _host() -> bytes:
    """Return bytes that are the same in all processes of this host since it started, and others elsewhere."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        boot = socket.gethostname().encode()
    return hashlib.sha256(boot).digest()[:_HOST_BYTES]


class PeerSums:
    """Sums over the ranks of a group, one GPU each.

    Args:
        rank, ranks: which this process is, and how many there are.
        device: of this rank.
        exchange: gives all ranks' bytes for this rank's, which are as many on each.

    Raises:
        RuntimeError: the GPUs cannot reach one another's memory, on this rank.
    """

    def __init__(
        self, rank: int, ranks: int, device: torch.device, exchange: Callable[[bytes], Sequence[bytes]]
    ) -> None:
        self._rank, self._ranks, self._device = rank, ranks, device
        self._memory: Any = None
        handle = refused = None
        address = 0
        try:
            # Only where it is used: Triton takes a second to import.
            from beheld.parallel import peer_sum_kernel as kernel

            self._kernel = kernel
            if ranks > kernel.MAX_RANKS:
                raise RuntimeError(f"the kernel has room for {kernel.MAX_RANKS} ranks")
            self._memory = platform_of(device).peer_memory()
            if self._memory is not None:
                address, handle = self._memory.allocate(kernel.buffer_bytes(ranks))
        except Exception as error:
            refused = error
        # All ranks take part in the exchange, whatever has failed on this one.
        size = 0 if self._memory is None else self._memory.handle_bytes
        try:
            own = (b"\1" if handle else b"\0") + _host() + (handle or b"").ljust(max(size, _HANDLE_BYTES), b"\0")
            answers = exchange(own)
            if not all(each[0] for each in answers):
                raise RuntimeError(str(refused) if refused else "a GPU has no memory that others can reach")
            if len({each[1 : 1 + _HOST_BYTES] for each in answers}) > 1:
                raise RuntimeError("the GPUs are of several hosts")
            handles = [each[1 + _HOST_BYTES : 1 + _HOST_BYTES + size] for each in answers]
            bases = [address if other == rank else self._memory.open(each) for other, each in enumerate(handles)]
            self._bases = torch.tensor(bases, dtype=torch.int64, device=device)
            self._epochs = torch.zeros(kernel.PROGRAMS, dtype=torch.int32, device=device)
            self._turn_epochs = torch.zeros(kernel.TURN_PROGRAMS, dtype=torch.int32, device=device)
            self._stop = torch.zeros(1, dtype=torch.int32).pin_memory()
        except BaseException:
            self.close()
            raise

    def takes(self, x: Tensor) -> bool:
        """True if `x` is of a type that is summed, and small enough for more than two ranks."""
        return x.dtype in _TYPES and (self._ranks == 2 or self._small(x))

    def _small(self, x: Tensor) -> bool:
        return x.numel() <= self._kernel.most_numbers(self._ranks, x.element_size())

    def sum_(self, x: Tensor) -> None:
        """Replace a contiguous `x` by its sum over all ranks, which has the same bits on each."""
        stop = self._stop.data_ptr()
        if self._small(x):
            self._kernel.sum_(x, self._bases, self._epochs, stop, self._rank, self._ranks)
        else:
            self._kernel.sum_in_turns_(x, self._bases, self._turn_epochs, stop, self._rank)

    def tried(self) -> bool:
        """Sum known numbers in each form; True if the sums are right. All ranks call this."""
        right = self._tried(3000, 0)
        if self._ranks == 2:
            # Of more turns than there are slots. In all cases, for the other rank waits.
            right &= self._tried(self._kernel.turn_numbers(torch.float32.itemsize) * 6 + 5, 1)
            right &= self._tried(self._kernel.turn_numbers(torch.float32.itemsize) * 5 + 3, 2)
        return right

    def _tried(self, count: int, first: int) -> bool:
        x = torch.arange(count, dtype=torch.float32, device=self._device) + (self._rank + first)
        wanted = self._ranks * (torch.arange(count, dtype=torch.float32) + first) + sum(range(self._ranks))
        self.sum_(x)
        done = platform_of(self._device).event()
        done.record()
        until = time.monotonic() + _TRIAL_S
        while not done.query():
            if time.monotonic() > until:
                self.abort()
            time.sleep(0.001)
        return bool(torch.equal(x.cpu(), wanted))

    def abort(self) -> None:
        """Let no sum wait for ranks that are gone; any thread may call it. All sums are wrong from then on."""
        self._stop.fill_(1)

    def close(self) -> None:
        """Give the memory back, once nothing on any device uses it any more."""
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()
