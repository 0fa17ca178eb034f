"""An engine and the processes beside it begin together, and end together when the start fails."""

from __future__ import annotations

from typing import Any

import pytest

from beheld import LLM
from beheld.api import start
from beheld.core.errors import CapacityError, WorkerError
from beheld.inputs.workers import Workers
from tests import tiny


def test_workers_begin_before_the_weights_and_end_with_a_start_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Workers] = []
    make = Workers.of

    def of(*given: Any) -> Workers:
        begun.append(make(*given))
        return begun[-1]

    def fails(*given: Any) -> Any:
        assert len(begun) == 1, "they load what they need meanwhile"
        raise CapacityError("There is not enough memory.")

    monkeypatch.setattr(start.Workers, "of", of)
    monkeypatch.setattr(start, "start", fails)
    with pytest.raises(CapacityError):
        LLM(str(tiny.checkpoint("qwen2_vl")), media_work="process", media_workers=1, max_model_len=128)
    (workers,) = begun
    assert workers.process_too
    with pytest.raises(WorkerError, match="closed"):
        workers._run("image", None)  # type: ignore[arg-type]
