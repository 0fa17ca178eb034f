"""What every oracle test asserts besides its answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from beheld.core.plan import StepPlan, StepResult
from beheld.engine.core import EngineCore

ORACLE = Path(__file__).with_name("test_oracle.py")


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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of a family follow one another, which share engines and transformers' answers."""
    places = [place for place, item in enumerate(items) if item.path == ORACLE and _family(item)]
    order: dict[str, int] = {}
    for place in places:
        order.setdefault(_family(items[place]), len(order))
    found = sorted((items[place] for place in places), key=lambda item: order[_family(item)])
    for place, item in zip(places, found, strict=True):
        items[place] = item


def _family(item: pytest.Item) -> str:
    """The family that the test is of; "" if it is of none."""
    return str(getattr(getattr(item, "callspec", None), "params", {}).get("family", ""))
