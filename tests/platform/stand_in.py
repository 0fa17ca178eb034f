"""A device that computes nothing (torch's "meta"), as a platform of its own: what any accelerator is asked."""

from __future__ import annotations

import pytest
import torch

from beheld.platform.cpu import Cpu
from beheld.platform.registry import PLATFORMS


class StandIn(Cpu):
    """An accelerator without kernels of ours; work on it goes on while the host does."""

    name = "meta"
    label = "stand-in"
    device = torch.device("meta")
    shares_host_memory = False
    synchronous = False
    packs_linears = False
    dense_decode_cache = False


def register(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the stand-in be a platform for one test."""
    monkeypatch.setitem(PLATFORMS, "meta", StandIn())
