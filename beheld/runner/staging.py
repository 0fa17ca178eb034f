"""A step's numbers on their way to the device: all of them in one copy, which the host does not wait for.

A copy from ordinary memory may make the host wait until the device has done all that was launched before; one from
pinned memory never does, and each costs the host some ten microseconds.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

# Every array begins at a multiple of this, as vectorised loads want it.
_ALIGNMENT = 16


def to_device(arrays: Mapping[str, np.ndarray], device: torch.device) -> dict[str, Tensor]:
    """The arrays as tensors on `device`, of the same names, shapes and types."""
    if device.type != "cuda":
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
