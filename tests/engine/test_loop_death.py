"""An engine whose executor is lost says so once, whichever of its threads is first."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from beheld.core.errors import EngineDeadError
from beheld.engine import loop
from beheld.engine.messages import Died, Lost


def lost() -> None:
    raise EngineDeadError("The process of rank 1 ended.", "Restart the engine.")


def made(put: Any, said: list[Any]) -> Any:
    core: Any = SimpleNamespace(executor=SimpleNamespace(check=lost))
    return loop._Death(core, SimpleNamespace(put=put), said.append)  # type: ignore[arg-type]


def timers() -> list[threading.Timer]:
    return [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]


def test_a_loop_that_ends_as_soon_as_it_is_woken_leaves_no_timer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It may end before the thread that woke it goes on."""
    monkeypatch.setattr(loop, "_FAILS_S", 0.2)
    said: list[Any] = []
    before = set(timers())

    def put(message: Any) -> None:
        assert message == Lost()
        death.tell(EngineDeadError("A rank is gone.", "Restart the engine."))
        death.call_off()

    death = made(put, said)
    death.expect()
    for timer in set(timers()) - before:
        timer.join()
    assert said == [Died("A rank is gone")]
    assert not caplog.messages


def test_a_loop_that_has_ended_is_not_woken() -> None:
    woken: list[Any] = []
    death = made(woken.append, [])
    death.call_off()
    before = set(timers())
    death.expect()
    assert not woken
    assert set(timers()) == before


def test_a_loop_that_does_not_come_is_told_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "_FAILS_S", 0.05)
    told = threading.Event()
    said: list[Any] = []

    def reply(message: Any) -> None:
        said.append(message)
        told.set()

    core: Any = SimpleNamespace(executor=SimpleNamespace(check=lost))
    loop._Death(core, SimpleNamespace(put=lambda message: None), reply).expect()  # type: ignore[arg-type]
    assert told.wait(5.0)
    assert said == [Died("The process of rank 1 ended")]
