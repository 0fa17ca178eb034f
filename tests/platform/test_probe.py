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


@pytest.mark.parametrize(
    ("given", "seen"),
    [({}, None), ({"CUDA_VISIBLE_DEVICES": ""}, []), ({"CUDA_VISIBLE_DEVICES": "5, 3,"}, ["5", "3"])],
)
def test_accelerators_that_a_process_sees(given: dict[str, str], seen: list[str] | None) -> None:
    assert probe.visible_accelerators(given) == seen
    assert seen is None or probe.visible_accelerators(probe.seeing(seen)) == seen


def test_a_rank_sees_its_own_accelerator() -> None:
    from beheld.platform.cuda import Cuda

    assert Cuda().rank_environment(1, {"CUDA_VISIBLE_DEVICES": "5, 3"}) == probe.seeing(["3"])
    assert Cuda().rank_environment(1, {}) == probe.seeing(["1"])
