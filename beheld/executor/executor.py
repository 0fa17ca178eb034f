"""What the engine needs of the place where a model runs, wherever that is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

from beheld.core.config import Capacity, EngineConfig, ModelInfo
from beheld.core.media import MediaItem
from beheld.core.plan import StepPlan, StepResult
from beheld.core.request import LoRARequest

Watch = Callable[[str, Any], None]
"""Takes the name of a stage ("embeds", "positions", "logits") and its tensor."""


@dataclass(frozen=True)
class ModelSize:
    """What a model's weights are on the device.

    Attributes:
        num_parameters: how many numbers.
        num_bytes: what they take, about.
    """

    num_parameters: int
    num_bytes: int


class Executor(Protocol):
    """Launches plans in order and gives back their results in the same order."""

    config: EngineConfig
    """What was decided; `start` may have lowered max_model_len."""
    capacity: Capacity
    """What the device has room for."""

    @classmethod
    def size(cls, hf_config: Any, info: ModelInfo, config: EngineConfig) -> ModelSize:
        """Of the model that this configuration describes; nothing is loaded.

        Raises:
            ModelError: there is no such model.
        """

    @classmethod
    def available_bytes(cls, config: EngineConfig) -> int:
        """Memory that is free now and that an engine may take: of the device, or of the host for a cache."""

    @classmethod
    def start(cls, hf_config: Any, info: ModelInfo, config: EngineConfig, *, shrink: bool) -> Self:
        """Load the model and make room for its cache.

        Args:
            shrink: lower max_model_len to what fits, and say so, instead of refusing.

        Raises:
            ModelError, CapacityError: with what to do.
        """

    def try_items(self, items: Sequence[MediaItem]) -> None:
        """Run the towers for items before anything else runs; nothing of them is kept.

        Raises:
            ModelError: a tower fails, or what it gives is not finite.
            CapacityError: there is not enough memory for it.
        """

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

    def watch(self, take: Watch | None) -> None:
        """Call `take` with the tensors of each step that follows, of steps that are no graphs; None: no more."""

    def embeddings(self, digest: bytes) -> Any | None:
        """The tensor that the device keeps for an item of media; None if it has none."""

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
