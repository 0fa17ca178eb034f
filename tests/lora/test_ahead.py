"""Adapters are read where requests are prepared, once, and the engine's own thread reads none."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from beheld import LLM, LoRARequest, SamplingParams
from beheld.core.errors import LoRAError
from beheld.lora import ahead
from beheld.lora.ahead import ReadAhead
from beheld.lora.load import WEIGHTS
from beheld.lora.slots import LoRASlots
from tests import tiny
from tests.lora import adapters
from tests.lora.adapters import Adapter
from tests.oracle import cases

PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


class Disk:
    """Stands for `load`: says who read what, and can be made to wait or to refuse."""

    def __init__(self) -> None:
        self.read: list[str] = []
        self.open = threading.Event()
        self.open.set()
        self.begun = threading.Semaphore(0)
        self.error: LoRAError | None = None

    def __call__(self, name: str, folder: str, form: Any) -> Any:
        self.read.append(name)
        self.begun.release()
        assert self.open.wait(10)
        if self.error is not None:
            raise self.error
        return f"{name} read {len(self.read)}"


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    made = Disk()
    monkeypatch.setattr(ahead, "load", made)
    return made


def lora(number: int) -> LoRARequest:
    return LoRARequest(f"a{number}", number, f"/{number}")


def test_what_was_read_is_here_until_it_is_held(disk: Disk) -> None:
    """At no moment of being taken does anybody who asks for it read it again."""
    held: set[int] = set()
    reading = ReadAhead(None, 2, held)  # type: ignore[arg-type]
    reading.read(lora(1))
    reading.read(lora(1))
    assert reading.take(lora(1)) == "a1 read 1"
    reading.read(lora(1))
    held.add(1)
    reading.read(lora(1))
    reading.forget(1)
    reading.read(lora(1))
    assert disk.read == ["a1"]
    held.clear()
    reading.read(lora(1))
    assert reading.take(lora(1)) == "a1 read 2"


def test_what_found_no_room_is_read_again(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """By then its files may be others."""
    monkeypatch.setattr(ahead, "load", lambda *given: SimpleNamespace(digest=disk(*given).encode()))
    slots = LoRASlots([], None, max_loras=1, max_host=1, switch=None)  # type: ignore[arg-type]
    slots.add(lora(1))
    slots.pin(1)
    slots.read(lora(2))
    with pytest.raises(LoRAError, match="pinned"):
        slots.add(lora(2))
    slots.remove(1)
    slots.read(lora(2))
    assert slots.add(lora(2)).digest == b"a2 read 3"


def test_what_is_refused_for_want_of_room_is_not_read_by_the_engine(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One reading ahead serves several requests; the second would have the engine's own thread read it."""
    monkeypatch.setattr(ahead, "load", lambda *given: SimpleNamespace(digest=disk(*given).encode()))
    slots = LoRASlots([], None, max_loras=1, max_host=1, switch=None)  # type: ignore[arg-type]
    slots.add(lora(1))
    slots.pin(1)
    slots.read(lora(2))
    for _ in range(3):
        with pytest.raises(LoRAError, match="pinned"):
            slots.add(lora(2))
    assert disk.read == ["a1", "a2"]


def test_whose_place_is_wanted_stays_if_the_other_cannot_be_read(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "load", lambda *given: SimpleNamespace(digest=disk(*given).encode()))
    slots = LoRASlots([], None, max_loras=1, max_host=1, switch=None)  # type: ignore[arg-type]
    slots.add(lora(1))
    disk.error = LoRAError("broken")
    with pytest.raises(LoRAError, match="broken"):
        slots.add(lora(2))
    assert [held.lora_int_id for held in slots.known()] == [1]


@pytest.mark.parametrize("change", ["other bytes", "touched", "gone"])
def test_what_was_read_of_other_files_does_not_count(disk: Disk, tmp_path: Path, change: str) -> None:
    """A request that read it may have ended before it came to the engine."""
    weights = tmp_path / WEIGHTS
    weights.write_bytes(b"old")
    asked = LoRARequest("a1", 1, str(tmp_path))
    reading = ReadAhead(None, 2, ())  # type: ignore[arg-type]
    reading.read(asked)
    assert reading.take(asked) == "a1 read 1"
    if change == "other bytes":
        weights.write_bytes(b"newer")
    elif change == "touched":
        os.utime(weights, (1, 1))
    else:
        weights.unlink()
    assert reading.take(asked) == "a1 read 2"
    reading.read(asked)
    reading.read(asked)
    assert reading.take(asked) == "a1 read 3"


def test_many_threads_read_it_once_and_all_have_it(disk: Disk) -> None:
    reading = ReadAhead(None, 2, ())  # type: ignore[arg-type]
    disk.open.clear()
    with ThreadPoolExecutor(4) as threads:
        waiting = [threads.submit(reading.read, lora(1)) for _ in range(4)]
        assert disk.begun.acquire(timeout=10)
        assert not any(one.done() for one in waiting)
        disk.open.set()
        assert [one.result(10) for one in waiting] == [None] * 4
    assert disk.read == ["a1"]


def test_who_takes_it_waits_for_the_thread_that_reads_it(disk: Disk) -> None:
    reading = ReadAhead(None, 2, ())  # type: ignore[arg-type]
    disk.open.clear()
    with ThreadPoolExecutor(2) as threads:
        begun = threads.submit(reading.read, lora(1))
        assert disk.begun.acquire(timeout=10)
        taken = threads.submit(reading.take, lora(1))
        disk.open.set()
        begun.result(10)
        assert taken.result(10) == "a1 read 1"


def test_a_refusal_is_not_remembered(disk: Disk) -> None:
    reading = ReadAhead(None, 2, ())  # type: ignore[arg-type]
    disk.error = LoRAError("broken")
    for act in (reading.read, reading.read, reading.take):
        with pytest.raises(LoRAError, match="broken"):
            act(lora(1))
    disk.error = None
    reading.read(lora(1))
    assert reading.take(lora(1)) == "a1 read 4"


@pytest.mark.parametrize("drop", [lambda reading: reading.forget(1), lambda reading: reading.read(lora(3))])
def test_what_is_not_taken_does_not_pile_up(disk: Disk, drop: Callable[[ReadAhead], None]) -> None:
    reading = ReadAhead(None, 2, ())  # type: ignore[arg-type]
    reading.read(lora(1))
    reading.read(lora(2))
    drop(reading)
    before = len(disk.read)
    assert reading.take(lora(2)) == "a2 read 2"
    assert len(disk.read) == before
    assert reading.take(lora(1)) == f"a1 read {before + 1}"


@pytest.mark.parametrize("workers", [None, 2])
def test_the_engine_reads_nothing_itself(workers: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [
        LoRARequest(f"a{seed}", seed + 1, adapters.write(Adapter("llama", seed, 2, "q_proj"), tmp_path / str(seed)))
        for seed in range(3)
    ]
    loras = [made[0], made[0], None, made[1], LoRARequest("gone", 9, str(tmp_path / "gone")), made[0], made[2]]
    readers: list[tuple[str, str]] = []
    read = ahead.load

    def watched(name: str, folder: str, form: Any) -> Any:
        readers.append((name, threading.current_thread().name))
        return read(name, folder, form)

    options = cases.ROOMY | {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 3, "max_lora_rank": 4}
    with LLM(str(tiny.checkpoint("llama")), dtype="float32", seed=0, media_workers=workers, **options) as llm:
        alone = [llm.generate("Hello", PARAMS, use_tqdm=False, lora_request=one)[0] for one in (None, *made)]
        for one in made:
            assert llm.remove_lora(one.lora_int_id)
        monkeypatch.setattr(ahead, "load", watched)
        outputs = llm.generate(["Hello"] * 7, PARAMS, use_tqdm=False, lora_request=loras, on_error="return")
    want = {None: alone[0], **dict(zip(made, alone[1:], strict=True))}
    for output, wished in zip(outputs, loras, strict=True):
        if wished is not None and wished.lora_name == "gone":
            assert isinstance(output.error, LoRAError)
        else:
            assert output.outputs[0].token_ids == want[wished].outputs[0].token_ids
    assert sorted(name for name, _ in readers) == ["a0", "a1", "a2", "gone"]
    if workers is not None:
        assert all(thread.startswith("beheld-prepare") for _, thread in readers), readers
