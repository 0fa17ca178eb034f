"""Brings a step's numbers to the device in one copy that the host does not wait for.

A copy from ordinary memory may make the host wait until the device has done all that was launched before; a copy from
pinned memory never does. Each copy costs the host some ten microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from beheld.platform.registry import platform_of
from beheld.runner import device_wait

# Buffers of a ring: while the device computes one step and the next is launched, the one after that is laid out.
_TURNS = 3
# Every array begins at a multiple of this, as vectorised loads want it.
_ALIGNMENT = 16


def to_device(arrays: Mapping[str, np.ndarray], device: torch.device) -> dict[str, Tensor]:
    """The arrays as tensors on `device`, of the same names, shapes and types."""
    platform = platform_of(device)
    if platform.shares_host_memory:
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
    if not platform.pinned_memory:
        return {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}
    begins, total = {}, 0
    for name, array in arrays.items():
        begins[name] = total
        total += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    # Its memory is used again only when the copy from it is over.
    host = torch.empty(total, dtype=torch.uint8, pin_memory=True)
    return unpacked(pack(arrays, begins, host).to(device, non_blocking=True), arrays, begins)


def pack(arrays: Mapping[str, np.ndarray], begins: Mapping[str, int], host: Tensor) -> Tensor:
    """Write each array's bytes to its place in `host`, which is returned."""
    flat = host.numpy()
    for name, array in arrays.items():
        flat[begins[name] : begins[name] + array.nbytes].view(array.dtype)[:] = array.reshape(-1)
    return host


def unpacked(flat: Tensor, arrays: Mapping[str, np.ndarray], begins: Mapping[str, int]) -> dict[str, Tensor]:
    """Views of what `pack` wrote."""
    made = {}
    for name, array in arrays.items():
        part = flat[begins[name] : begins[name] + array.nbytes]
        made[name] = part.view(torch.from_numpy(array[:0].reshape(-1)).dtype).view(array.shape)
    return made


class Ring:
    """A few equal buffers of the host, used in turn, whose contents go to the same place on the device at each step.

    A buffer is written again only when its last copy has been made. Nothing else ensures that: the host waits for steps
    that choose tokens, and runs ahead of steps that only prefill.

    Args:
        make: gives a buffer; its argument says whether it lies in pinned memory.
    """

    def __init__(self, make: Callable[[bool], Tensor], device: torch.device) -> None:
        platform = platform_of(device)
        self.buffers = tuple(make(platform.pinned_memory) for _ in range(_TURNS))
        # When the last copy from each has been made; copies within the host are made at once.
        self._copied = tuple(platform.event() for _ in range(0 if platform.synchronous else _TURNS))
        self._turn = 0

    def turn(self) -> int:
        """The buffer to be written now; waits until it may be."""
        self._turn = (self._turn + 1) % _TURNS
        if self._copied:
            with device_wait.waiting():
                self._copied[self._turn].synchronize()
        return self._turn

    def send(self, turn: int, target: Tensor) -> None:
        """Copy the head of a buffer, of the target's size along its first axis, to the device."""
        target.copy_(self.buffers[turn][: len(target)], non_blocking=True)
        if self._copied:
            self._copied[turn].record()
