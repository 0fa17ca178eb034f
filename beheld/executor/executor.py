"""The executor protocol: what the engine needs from the place where a model runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

from beheld.core.config import Capacity, EngineConfig, KVGroup, ModelInfo, TokenCost
from beheld.core.media import MediaItem
from beheld.core.plan import StepPlan, StepResult
from beheld.core.request import LoRARequest
from beheld.core.sleep import EnginePart

Watch = Callable[[str, Any], None]
"""A callback that takes the name of a stage ("embeds", "positions", "logits") and its tensor."""


@dataclass(frozen=True)
class ModelSize:
    """The size of a model's weights on the device.

    Attributes:
        num_parameters: number of parameters, of one rank if ranks share the model.
        num_bytes: their approximate size.
        kv_groups: the cache groups with the heads that one device holds; empty if it holds all.
        num_sums: how often ranks add hidden states up in a step.
        cost: what a token costs one device; None if it is not known.
    """

    num_parameters: int
    num_bytes: int
    kv_groups: tuple[KVGroup, ...] = ()
    num_sums: int = 0
    cost: TokenCost | None = None


class Executor(Protocol):
    """Launches plans in order and gives back their results in the same order."""

    config: EngineConfig
    """The engine's configuration; `start` may have lowered max_model_len."""
    capacity: Capacity
    """The device's capacity."""

    @classmethod
    def size(cls, hf_config: Any, info: ModelInfo, config: EngineConfig) -> ModelSize:
        """The size of the model that this configuration describes; loads nothing.

        Raises:
            ModelError: there is no such model.
        """

    @classmethod
    def available_bytes(cls, config: EngineConfig) -> int:
        """Free memory that an engine may use: of the device, or of the host for a cache."""

    @classmethod
    def start(cls, hf_config: Any, info: ModelInfo, config: EngineConfig, *, shrink: bool) -> Self:
        """Load the model and allocate its cache.

        Args:
            shrink: if max_model_len does not fit, lower it and log that, instead of refusing.

        Raises:
            ModelError, CapacityError: the message says what to do.
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
            Exception: this step failed; others may succeed.
        """

    def collect(self, handle: Any) -> StepResult:
        """Wait for a launched step; raises the same errors as `launch`."""

    def missing(self, digests: Iterable[bytes]) -> tuple[bytes, ...]:
        """The `digests` whose embeddings are not on the device after all launched steps."""

    def watch(self, take: Watch | None) -> None:
        """Call `take` with the tensors of each following step, except steps that run as graphs; None stops it."""

    def embeddings(self, digest: bytes) -> Any | None:
        """The device's tensor for a media item; None if it has none."""

    def read_lora(self, request: LoRARequest) -> None:
        """Read an adapter into memory before `add_lora` needs it. Any thread may call this while steps run.

        Raises:
            LoRAError: the adapter cannot be used.
        """

    def add_lora(self, request: LoRARequest) -> LoRARequest:
        """Load an adapter into memory unless it is there; returns the request with its digest.

        Raises:
            LoRAError: the adapter cannot be used.
        """

    def remove_lora(self, lora_int_id: int) -> bool:
        """Remove an adapter; False if it is unknown."""

    def pin_lora(self, lora_int_id: int) -> bool:
        """Keep an adapter in memory until it is removed; False if it is unknown."""

    def loras(self) -> tuple[LoRARequest, ...]:
        """The adapters in host memory."""

    def check_sleeps(self) -> None:
        """Check that `sleep` is possible.

        Raises:
            ConfigError: this executor cannot.
        """

    def sleep(self, level: int) -> None:
        """Give back the memory of the cache and of all that is computed; with level 2, of the weights, too.

        No step may be in flight. Until `wake_up` has brought all back, nothing but `wake_up`, `sleep`, `loras`, `check`
        and `close` may be called. `sleep` then gives back what is there again, and what a lower level had left.
        """

    def wake_up(self, parts: Collection[EnginePart]) -> None:
        """Take memory for these parts again, and read weights that were given back.

        Steps can run once all have come. The cache is empty then; the adapters are those of before.

        Raises:
            ModelError, CapacityError: it sleeps on; a later call may succeed.
        """

    def checksums(self) -> dict[str, str]:
        """The SHA-256 of each tensor of weights, by pp{stage}:pcp0:tp{rank}:{name}; adapters are left out."""

    def reset_weights(self) -> None:
        """Make all weights zero. No step may be in flight; `sleep` at level 2 and `wake_up` read them again.

        Raises:
            ConfigError: this executor cannot sleep, and so could not read them again.
        """

    def check(self) -> None:
        """Check that steps can still run, without running one.

        Raises:
            EngineDeadError: a process that runs them is gone.
        """

    def on_loss(self, tell: Callable[[], None]) -> None:
        """Call `tell` once, from any thread, as soon as `check` raises, also if nothing runs."""

    def close(self) -> None:
        """Free everything."""
