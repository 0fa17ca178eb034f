"""Platforms of their own for tests: one whose device computes nothing, and one that computes as plainly as it can."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from beheld.platform.cpu import Cpu
from beheld.platform.cuda import Cuda
from beheld.platform.platform import Event, Needs
from beheld.platform.registry import PLATFORMS

_MEMORY = 16 << 30


class StandIn(Cpu):
    """An accelerator without kernels of ours (torch's "meta"); work on it goes on while the host does."""

    name = "meta"
    label = "stand-in"
    device = torch.device("meta")
    shares_host_memory = False
    synchronous = False
    packs_linears = False
    dense_decode_cache = False


class Plain(Cpu):
    """What another vendor's first file says: memory and options of an accelerator, and no kernel, graph or compiler.

    torch's CPU computes for it, so it stands in the place of the CPU's platform, as AMD's would in that of NVIDIA's.
    A tensor that is left on the host is therefore not noticed here; the tests with the device "meta" notice it.

    Attributes:
        num_events: how many events were asked for.
        num_uploaded: how many host tensors were brought to the device.
    """

    label = "stand-in"
    place = "on the stand-in"
    defaults = Cuda.defaults
    ignored_options = ()
    cache_option = Cuda.cache_option
    shares_host_memory = False
    synchronous = False
    splits = True
    packs_linears = False
    dense_decode_cache = False
    grouped_products = False
    bfloat16_products = True
    float16_products = True
    int8_products = False
    no_grouped_products = no_int8_rows = "it has no such kernel"
    needs = Needs()

    def __init__(self) -> None:
        self.num_events = self.num_uploaded = 0
        self._before = self.reserved_bytes()

    def memory(self) -> tuple[int, int]:
        """As if this process had 16 GiB of its own from now on."""
        return _MEMORY - max(0, self.reserved_bytes() - self._before), _MEMORY

    def unused_bytes(self) -> int:
        """See Platform."""
        return self.memory()[0]

    def default_dtype(self, stored: str) -> tuple[str, str | None]:
        """The stored one."""
        return stored, None

    def event(self, *, timing: bool = False) -> Event:
        """See Platform."""
        self.num_events += 1
        return super().event(timing=timing)

    def uploader(self, device: torch.device) -> Callable[[Tensor], Tensor]:
        """Copies, as to memory of its own."""

        def upload(host: Tensor) -> Tensor:
            self.num_uploaded += 1
            return host.clone()

        return upload


def register(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the stand-in be a platform for one test."""
    monkeypatch.setitem(PLATFORMS, "meta", StandIn())


def register_plain(monkeypatch: pytest.MonkeyPatch) -> Plain:
    """Let the plain platform have the CPU for one test."""
    plain = Plain()
    monkeypatch.setitem(PLATFORMS, "cpu", plain)
    return plain
