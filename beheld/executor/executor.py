"""What the engine needs of a runner, wherever it lives."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from beheld.core.config import Capacity, EngineConfig
from beheld.core.plan import StepPlan, StepResult
from beheld.core.request import LoRARequest


class Executor(Protocol):
    """Launches plans in order and gives back their results in the same order."""

    config: EngineConfig
    capacity: Capacity

    def launch(self, plan: StepPlan) -> Any:
        """Start a step; returns a handle.

        Raises:
            EngineDeadError: the device is lost.
            Exception: this step cannot be carried out; another may be.
        """

    def collect(self, handle: Any) -> StepResult:
        """Wait for a launched step; raises as `launch`."""

    def missing(self, digests: Iterable[bytes]) -> tuple[bytes, ...]:
        """Those of `digests` whose embeddings are not on the device, after all that was launched."""

    def read_lora(self, request: LoRARequest) -> None:
        """Read an adapter, unless it is here, so that adding it need not; from any thread, while others go on.

        Raises:
            LoRAError: it cannot be used.
        """

    def add_lora(self, request: LoRARequest) -> LoRARequest:
        """Take an adapter into memory, unless it is here; gives the request with its digest.

        Raises:
            LoRAError: it cannot be used.
        """

    def remove_lora(self, lora_int_id: int) -> bool:
        """Forget an adapter; False if it is not known."""

    def pin_lora(self, lora_int_id: int) -> bool:
        """Keep an adapter until it is removed; False if it is not known."""

    def loras(self) -> tuple[LoRARequest, ...]:
        """The adapters in the host's memory."""

    def close(self) -> None:
        """Give everything back."""
