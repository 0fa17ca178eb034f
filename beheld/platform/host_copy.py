"""Copies to and from the host's memory, made while the device goes on."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from beheld.platform.registry import platform_of


def copied(x: Tensor) -> Tensor:
    """A copy in host memory, complete once the device has done all work launched so far.

    The memory is pinned, so the copy is asynchronous; it is not reused before the copy is complete.
    """
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=platform_of(x.device).pinned_memory)
    return host.copy_(x, non_blocking=True)


def sent(array: np.ndarray, device: torch.device) -> Tensor:
    """A copy on `device`; the host does not wait for it."""
    host = torch.from_numpy(array)
    pinned = platform_of(device).pinned_memory
    return (host.pin_memory() if pinned else host).to(device, non_blocking=True)
