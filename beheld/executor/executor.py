"""What the engine needs of a runner, wherever it lives."""

from __future__ import annotations

from typing import Any, Protocol

from beheld.core.config import Capacity, EngineConfig
from beheld.core.plan import StepPlan, StepResult


class Executor(Protocol):
    """Launches plans in order and gives back their results in the same order."""

    config: EngineConfig
    capacity: Capacity

    def launch(self, plan: StepPlan) -> Any:
        """Start a step; returns a handle."""

    def collect(self, handle: Any) -> StepResult:
        """Wait for a launched step."""

    def close(self) -> None:
        """Give everything back."""
