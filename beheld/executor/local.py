"""The executor that runs the model in the caller's process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Self

import torch

from beheld.core.config import EngineConfig, ModelInfo
from beheld.core.errors import AsleepError
from beheld.core.media import MediaItem
from beheld.core.plan import StepPlan, StepResult
from beheld.core.request import LoRARequest
from beheld.core.sleep import EnginePart
from beheld.executor.executor import ModelSize, Watch
from beheld.runner import capacity
from beheld.runner.build import build_runner, count_weights
from beheld.runner.faults import let_go, loss_of
from beheld.runner.runner import Handle, ModelRunner
from beheld.runner.sleep import SleepingRunner


class LocalExecutor:
    """Runs plans one after another on this process's device.

    Args:
        runner: what runs them.
        source: transformers' configuration and the facts of the model that it was built of; None if it never sleeps.
    """

    def __init__(self, runner: ModelRunner, source: tuple[Any, ModelInfo] | None = None) -> None:
        self._runner: ModelRunner | SleepingRunner = runner
        self._source = source
        self.config = runner.config
        self.capacity = runner.capacity

    @property
    def runner(self) -> ModelRunner:
        """The runner.

        Raises:
            AsleepError: it sleeps.
        """
        if isinstance(self._runner, SleepingRunner):
            raise AsleepError("The engine sleeps.", "Wake it up first.")
        return self._runner

    @classmethod
    def size(cls, hf_config: Any, info: ModelInfo, config: EngineConfig) -> ModelSize:
        """See Executor."""
        weights = count_weights(hf_config, info, config)
        return ModelSize(weights.num_parameters, weights.num_bytes, cost=weights.cost)

    @classmethod
    def available_bytes(cls, config: EngineConfig) -> int:
        """See Executor."""
        return capacity.available_bytes(config)

    @classmethod
    def start(cls, hf_config: Any, info: ModelInfo, config: EngineConfig, *, shrink: bool) -> Self:
        """See Executor."""
        return cls(build_runner(hf_config, info, config, shrink=shrink), (hf_config, info))

    def try_items(self, items: Sequence[MediaItem]) -> None:
        """Run the towers for items."""
        self.runner.try_items(items)

    def launch(self, plan: StepPlan) -> Handle:
        """Start a step."""
        try:
            return self.runner.launch(plan)
        except Exception as error:
            self._check(error)
            raise

    def collect(self, handle: Handle) -> StepResult:
        """Wait for a launched step."""
        try:
            return self.runner.collect(handle)
        except Exception as error:
            self._check(error)
            raise

    def _check(self, error: Exception) -> None:
        device = torch.device(self.config.device)
        let_go(error, device)
        loss = loss_of(error, device)
        if loss is not None:
            raise loss from error

    def missing(self, digests: Iterable[bytes]) -> tuple[bytes, ...]:
        """See Executor."""
        return self.runner.missing(digests)

    def watch(self, take: Watch | None) -> None:
        """See Executor."""
        self.runner.watch = take

    def embeddings(self, digest: bytes) -> torch.Tensor | None:
        """See Executor."""
        return self.runner.encoder.known(digest)

    def read_lora(self, request: LoRARequest) -> None:
        """See Executor."""
        self.runner.read_lora(request)

    def add_lora(self, request: LoRARequest) -> LoRARequest:
        """See Executor."""
        return self.runner.add_lora(request)

    def remove_lora(self, lora_int_id: int) -> bool:
        """See Executor."""
        return self.runner.remove_lora(lora_int_id)

    def pin_lora(self, lora_int_id: int) -> bool:
        """See Executor."""
        return self.runner.pin_lora(lora_int_id)

    def loras(self) -> tuple[LoRARequest, ...]:
        """See Executor."""
        return self._runner.loras()

    def check_sleeps(self) -> None:
        """See Executor; it can."""

    def sleep(self, level: int) -> None:
        """See Executor."""
        assert self._source is not None, "ranks do not sleep"
        if isinstance(self._runner, ModelRunner):
            self._runner = SleepingRunner(*self._source, self._runner, level)
        else:
            self._runner.sleep(level)
        self._runner.give_back()

    def wake_up(self, parts: Collection[EnginePart]) -> None:
        """See Executor."""
        if isinstance(self._runner, SleepingRunner):
            self._runner = self._runner.wake_up(parts) or self._runner

    def checksums(self) -> dict[str, str]:
        """See Executor."""
        return {f"pp0:pcp0:tp0:{name}": digest for name, digest in self.runner.checksums().items()}

    def reset_weights(self) -> None:
        """See Executor."""
        self.runner.reset_weights()

    def check(self) -> None:
        """See Executor; a device that is lost shows in its next step."""

    def on_loss(self, tell: Callable[[], None]) -> None:
        """See Executor; nothing is lost while nothing runs."""

    def close(self) -> None:
        """Free the model and the cache."""
        del self._runner
