"""NCCL, which sums, gathers and sends tensors between NVIDIA GPUs.

It reads environment variables, which are set while groups of this process use it; it takes them from nowhere else.
Processes that are started after that do not get them.
"""

from __future__ import annotations

import datetime
import os
from typing import Any

from beheld.core.errors import ConfigError
from beheld.utils.held_variables import HELD, HeldVariables

# What NCCL reads when a group is made, unless the user has set it: it leaves NVLink multicast off, and does not end
# this process when another rank is gone, which the watchdog of the executor notices.
_NCCL = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
_INTERFACE, _LOOPBACK = "NCCL_SOCKET_IFNAME", "lo"


class Nccl:
    """See Collectives."""

    name = "NCCL"

    def __init__(self, held: HeldVariables) -> None:
        self._held = held
        # NCCL chooses it once in a process.
        self._interface: str | None = None

    def hold(self, interface: str | None) -> None:
        """See Collectives: set the variables that have no value.

        Args:
            interface: by which ranks connect; None if its name is not known.

        Raises:
            ConfigError: the NCCL of this process uses the loopback interface, and ranks on several hosts need another.
        """
        wanted = dict(_NCCL)
        named = os.environ.get(_INTERFACE)
        if interface is not None and (named is None or self._held.has_set(_INTERFACE, named)):
            if self._interface == _LOOPBACK != interface:
                raise ConfigError(
                    "An earlier engine of this process had all its ranks on this host, so NCCL keeps to the interface "
                    f"{_LOOPBACK}; ranks on several hosts need {interface}.",
                    "Start this engine in a new process.",
                    param="distributed_executor_backend",
                )
            self._interface = self._interface or interface
            wanted[_INTERFACE] = interface
        self._held.hold(wanted)

    def leave(self) -> None:
        """See Collectives: take back what was set, if no group is left."""
        self._held.leave()

    def group(self, store: Any, rank: int, size: int, limit: datetime.timedelta) -> Any:
        """See Collectives."""
        from torch import distributed

        # Its stubs lack what is used here.
        dist: Any = distributed
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        return dist.ProcessGroupNCCL(store, rank, size, options)


NCCL = Nccl(HELD)
