"""The runner in the caller's own process."""

from __future__ import annotations

from typing import Any

from beheld.attention.select import select
from beheld.core.config import EngineConfig, ModelInfo
from beheld.core.plan import StepPlan, StepResult
from beheld.models import registry
from beheld.runner import capacity
from beheld.runner.runner import Handle, ModelRunner


class LocalExecutor:
    """Loads the model, measures the memory, and runs plans one after the other."""

    def __init__(self, hf_config: Any, info: ModelInfo, config: EngineConfig) -> None:
        adapter = registry.build(hf_config, info, config)
        self.capacity = capacity.measure(info, config)
        self.runner = ModelRunner(adapter, select(config.device, config.attention_backend), info, config, self.capacity)
        self.runner.self_test()

    def launch(self, plan: StepPlan) -> Handle:
        """Start a step."""
        return self.runner.launch(plan)

    def collect(self, handle: Handle) -> StepResult:
        """Wait for a launched step."""
        return self.runner.collect(handle)

    def close(self) -> None:
        """Drop the model and the cache."""
        del self.runner
