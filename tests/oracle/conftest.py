"""What every oracle test asserts besides its answers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from beheld.core.plan import StepPlan, StepResult
from beheld.engine.core import EngineCore


@pytest.fixture(autouse=True)
def nothing_is_retried(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A step that fails is launched again, one by one, with the same answers: these would tell of no fault."""
    reasons: list[str] = []
    retry = EngineCore._retry

    def told(core: EngineCore, plan: StepPlan, reason: str) -> StepResult:
        reasons.append(reason)
        return retry(core, plan, reason)

    monkeypatch.setattr(EngineCore, "_retry", told)
    yield
    assert reasons == []
