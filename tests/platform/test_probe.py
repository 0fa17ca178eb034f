"""What finds devices before torch is imported: an accelerator's driver, of one vendor or of several."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from beheld.core.config import EngineArgs
from beheld.core.errors import ConfigError
from beheld.engine.process_group import environments
from beheld.platform import driver, probe
from beheld.platform.cuda_driver import DRIVER
from beheld.platform.driver import Driver
from beheld.platform.room import check_room

OTHER = Driver(
    name="other",
    file=Path("/dev/other-control"),
    device_files="other-[0-9]*",
    visible="OTHER_VISIBLE",
    library="libother.so",
    start="otherInit",
    prefixes=("OTHERCCL_",),
)


class Library:
    """Counts calls of its one function."""

    def __init__(self, begun: threading.Event) -> None:
        self.cuInit: Callable[[int], Any] = lambda flags: begun.set()


@pytest.mark.parametrize(("wanted", "starts"), [(None, True), ("auto", True), ("cuda", True), ("cpu", False)])
def test_the_driver_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wanted: str | None, starts: bool) -> None:
    begun = threading.Event()
    monkeypatch.setattr(probe, "DRIVERS", (replace(DRIVER, file=tmp_path),))
    monkeypatch.setattr(driver.ctypes, "CDLL", lambda name: Library(begun))
    probe.begin_driver(wanted)
    assert begun.wait(5.0 if starts else 0.1) == starts


def test_a_machine_without_its_library_or_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    failed: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    for file in (tmp_path, tmp_path / "none"):
        monkeypatch.setattr(probe, "DRIVERS", (replace(DRIVER, file=file, library="libbeheld_has_none.so.1"),))
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
    assert DRIVER.seen(given) == seen
    assert seen is None or DRIVER.seen(DRIVER.seeing(seen)) == seen


def test_a_rank_sees_its_own_accelerator() -> None:
    from beheld.platform.cuda import Cuda

    assert Cuda().rank_environment(1, {"CUDA_VISIBLE_DEVICES": "5, 3"}) == {"CUDA_VISIBLE_DEVICES": "3"}
    assert Cuda().rank_environment(1, {}) == {"CUDA_VISIBLE_DEVICES": "1"}


def test_a_second_vendor_is_one_more_entry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All that is asked early follows: help, which driver is there, variables of processes, and room for engines."""
    theirs, ours = replace(OTHER, file=tmp_path / "other"), replace(DRIVER, file=tmp_path / "cuda")
    monkeypatch.setattr(probe, "DRIVERS", (ours, theirs))
    assert probe.device_words() == "`cpu` or `cuda` or `other`"
    assert probe.seeing_none() == {"CUDA_VISIBLE_DEVICES": "", "OTHER_VISIBLE": ""}
    assert set(probe.variable_prefixes()) == {"NCCL_", "OTHERCCL_"}
    assert probe.driver_of(None) is None
    theirs.file.touch()
    assert [probe.driver_of(wanted) for wanted in (None, "auto", "other")] == [theirs] * 3
    assert [probe.driver_of(wanted) for wanted in ("cpu", "cuda")] == [None] * 2
    made = environments(2, 1, probe.driver_of(None), {"OTHER_VISIBLE": "4,6", "CUDA_VISIBLE_DEVICES": "0"}, 8)
    assert [each["OTHER_VISIBLE"] for each in made] == ["4", "6"]
    monkeypatch.setenv("OTHER_VISIBLE", "4,6")
    with pytest.raises(ConfigError, match="needs 3 GPUs, 1 for each engine, and there are 2"):
        check_room(EngineArgs(device="other", data_parallel_size=3))
    # Where both are there, the first is taken, unless the other is named.
    ours.file.touch()
    assert [probe.driver_of(wanted) for wanted in (None, "other")] == [ours, theirs]


def test_vendors_that_share_a_name_of_torch_s(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """torch for AMD calls its devices as NVIDIA's."""
    theirs = replace(OTHER, name="cuda", file=tmp_path)
    monkeypatch.setattr(probe, "DRIVERS", (replace(DRIVER, file=tmp_path / "none"), theirs))
    assert probe.device_words() == "`cpu` or `cuda`"
    assert probe.driver_of("cuda") is theirs
