"""A count of ranks, stages or engines that cannot be is refused before a process starts or a library loads."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from beheld import LLM, AsyncLLM
from beheld.cli.main import main
from beheld.core.config import EngineArgs
from beheld.core.errors import ConfigError
from beheld.executor.multi import MultiExecutor
from beheld.platform import cuda_driver, probe
from beheld.platform.driver import Driver
from beheld.platform.room import check_room

COUNTS = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
MP = {"device": "cpu", "distributed_executor_backend": "mp"}


@pytest.fixture(autouse=True)
def _starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*words: Any, **named: Any) -> Any:
        raise AssertionError(f"a process was started: {words}")

    monkeypatch.setattr(subprocess, "Popen", refuse)


@pytest.mark.parametrize("make", [LLM, AsyncLLM])
@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", [0, -1, "2", "two", 2.0, True, None], ids=repr)
def test_what_is_no_count(make: Any, name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be a whole number from 1, got {value!r}") as caught:
        make(device="cpu", **{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("options", "wanted", "param"),
    [
        ({"data_parallel_size": 9}, 9, "data_parallel_size"),
        ({"tensor_parallel_size": 9}, 9, "tensor_parallel_size"),
        ({"tensor_parallel_size": 3, "pipeline_parallel_size": 3}, 9, "tensor_parallel_size"),
        ({"tensor_parallel_size": 5, "data_parallel_size": 2}, 10, "data_parallel_size"),
    ],
)
def test_more_processes_than_a_cpu_takes(
    options: dict[str, int], wanted: int, param: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    with pytest.raises(ConfigError, match=f"ask for {wanted} processes, and this machine has 2 cores") as caught:
        LLM(**MP | options)
    assert caught.value.param == param
    assert "8 at most" in str(caught.value)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(wanted)))
    check_room(EngineArgs(**MP | options))


@pytest.mark.parametrize(
    "options",
    [
        # What will run on eight GPUs is tried on two cores.
        {**MP, "tensor_parallel_size": 4, "data_parallel_size": 2},
        # A CPU does not split a model, unless asked to.
        {"device": "cpu", "tensor_parallel_size": 64},
        {"device": "cpu", "tensor_parallel_size": 64, "distributed_executor_backend": "ray"},
        {"device": "cpu", "data_parallel_size": 64, "data_parallel_backend": "ray"},
        {"device": "cpu", "tensor_parallel_size": 64, "distributed_executor_backend": "external_launcher"},
    ],
)
def test_processes_that_have_room_or_are_elsewhere(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    check_room(EngineArgs(**options))


def test_several_engines_on_fewer_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "DRIVERS", (replace(cuda_driver.DRIVER, file=tmp_path),))
    monkeypatch.setattr(Driver, "num_devices", lambda driver: 3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(ConfigError, match="needs 4 GPUs, 2 for each engine, and there are 3"):
        LLM(data_parallel_size=2, tensor_parallel_size=2)
    check_room(EngineArgs(data_parallel_size=3))
    # It runs on one GPU that holds the model.
    check_room(EngineArgs(tensor_parallel_size=4))


def test_more_stages_than_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """mote has four layers."""
    monkeypatch.setattr(MultiExecutor, "place", classmethod(lambda cls, config: pytest.fail("ranks were started")))
    with pytest.raises(ConfigError, match=r"cannot be cut into 5 stages\. Give pipeline_parallel_size=4 at most"):
        LLM("mote", pipeline_parallel_size=5, media_workers=0, **MP)


@pytest.mark.parametrize(
    "words",
    [
        ["ask", "-tp", "0", "hi"],
        ["serve", "mote", "-dp", "0"],
        ["serve", "mote", "-dp=-1"],
        ["serve", "mote", "-pp", "0", "--engine", "process"],
        ["chat", "-tp", "0"],
        ["batch", "a.jsonl", "b.jsonl", "--ray", "-dp", "0"],
        ["run-batch", "-i", "a.jsonl", "-o", "b.jsonl", "-tp", "0"],
    ],
    ids=" ".join,
)
def test_commands_refuse_it(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 1
    assert "_parallel_size must be a whole number from 1, got " in capsys.readouterr().err


def test_commands_refuse_it_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading it takes seconds, and on busy cores a minute."""
    monkeypatch.undo()
    lines = [["ask", "-tp", "0", "hi"], ["serve", "mote", "-dp", "0"], ["serve", "mote", "-dp", "1000"]]
    run = f"print([main(each) for each in {lines}], 'torch' in sys.modules)"
    code = f"import sys; from beheld.cli.main import main; {run}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[1, 1, 1] False", done.stderr
