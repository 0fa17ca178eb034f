"""An accelerator's driver starts in a thread, and what is missing of it harms nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from beheld.platform import probe


class Library:
    """Counts calls of its one function."""

    def __init__(self, begun: threading.Event) -> None:
        self.cuInit: Callable[[int], Any] = lambda flags: begun.set()


@pytest.mark.parametrize(("wanted", "starts"), [(None, True), ("auto", True), ("cuda", True), ("cpu", False)])
def test_the_driver_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wanted: str | None, starts: bool) -> None:
    begun = threading.Event()
    monkeypatch.setattr(probe, "_DRIVERS", (tmp_path,))
    monkeypatch.setattr(probe.ctypes, "CDLL", lambda name: Library(begun))
    probe.begin_driver(wanted)
    assert begun.wait(5.0 if starts else 0.1) == starts


def test_a_machine_without_its_library_or_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    failed: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    monkeypatch.setattr(probe, "_LIBRARY", "libbeheld_has_none.so.1")
    for driver in (tmp_path, tmp_path / "none"):
        monkeypatch.setattr(probe, "_DRIVERS", (driver,))
        probe.begin_driver(None)
        for thread in threading.enumerate():
            if thread.name == "beheld-driver":
                thread.join(5.0)
    assert not failed
