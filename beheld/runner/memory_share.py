"""The part of a GPU's memory that an engine may take, as `gpu_memory_utilization` says."""

from __future__ import annotations

import gc
from dataclasses import dataclass

from beheld.core.errors import CapacityError
from beheld.models.out_of_memory import gib
from beheld.platform.platform import Platform


@dataclass(frozen=True)
class MemoryShare:
    """What an engine may take of a GPU, and what was there when it began: others may hold the rest.

    Attributes:
        platform: of the GPU.
        fraction: of the whole GPU, from 0 to 1.
        total_bytes: the GPU's memory.
        free_bytes: what was free when the engine started.
        held_bytes: what PyTorch held in this process when the engine started, for example for another engine.
    """

    platform: Platform
    fraction: float
    total_bytes: int
    free_bytes: int
    held_bytes: int

    @classmethod
    def of(cls, platform: Platform, fraction: float) -> MemoryShare:
        """The share of an engine that starts now."""
        # An engine that was dropped earlier leaves cycles of objects, and memory that PyTorch keeps for later.
        if platform.reserved_bytes():
            gc.collect()
            platform.empty_cache()
        free, total = platform.memory()
        return cls(platform, fraction, total, free, platform.reserved_bytes())

    @property
    def limit_bytes(self) -> int:
        """The most that the engine may take."""
        return int(self.fraction * self.total_bytes)

    def check(self) -> None:
        """Check that the share is free.

        Raises:
            CapacityError: less than the share is free; the message names both, and the fraction that is.
        """
        if self.free_bytes >= self.limit_bytes:
            return
        fitting = int(100 * self.free_bytes / self.total_bytes) / 100
        raise CapacityError(
            f"gpu_memory_utilization={self.fraction:g} is {gib(self.limit_bytes)} of the GPU's "
            f"{gib(self.total_bytes)}, and only {gib(self.free_bytes)} are free: others hold the rest.",
            f"Set gpu_memory_utilization to at most {fitting:g}, or end what else uses the GPU."
            if fitting
            else "End what else uses the GPU.",
            param="gpu_memory_utilization",
        )

    def left_bytes(self) -> int:
        """Bytes that may still be taken: the share without what was taken since the start, at most what is free."""
        free, _ = self.platform.memory()
        # What PyTorch holds is the engine's for certain; the driver's and the libraries' own shows in what is free.
        taken = max(self.free_bytes - free, self.platform.reserved_bytes() - self.held_bytes)
        return max(0, min(free, self.limit_bytes - taken))
