"""Copies of results in the host's memory, made while the device goes on."""

from __future__ import annotations

import torch
from torch import Tensor

from beheld.platform.registry import platform_of


def copied(x: Tensor) -> Tensor:
    """A copy in host memory, complete once the device has done all work launched so far.

    The memory is pinned, so the copy is asynchronous; it is not reused before the copy is complete.
    """
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=platform_of(x.device).pinned_memory)
    return host.copy_(x, non_blocking=True)
