"""A model that was to be split over GPUs runs on one that holds it, and is refused with the sizes where none does."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from beheld import LLM
from beheld.api.start import start_processes
from beheld.checkpoint.info import read_config
from beheld.checkpoint.resolve import resolve
from beheld.core.config import EngineArgs
from beheld.core.errors import ConfigError
from beheld.core.pooling import PoolerInfo
from beheld.engine import ranks as engine_ranks
from beheld.engine.ranks import check_ranks, ranks_of, with_fitting_ranks
from beheld.engine.setup import check
from beheld.executor.launched import agreed_seed
from beheld.executor.local import LocalExecutor
from tests import tiny
from tests.inputs import pipes

FAMILY = "llava"


def weights(device: str = "cuda") -> int:
    """What the weights of the tiny checkpoint take in float32."""
    hf_config = read_config(resolve(EngineArgs(model=str(tiny.checkpoint(FAMILY)))), EngineArgs())
    model = pipes.info(FAMILY)
    return LocalExecutor.size(hf_config, model, pipes.config(model, device=device)).num_bytes


def ask(asked: int, available: int, monkeypatch: pytest.MonkeyPatch, device: str = "cuda", **more: int) -> None:
    """Check `asked` GPUs on a machine whose device has so many bytes."""
    args = EngineArgs(model=str(tiny.checkpoint(FAMILY)), tensor_parallel_size=asked, **more)  # type: ignore[arg-type]
    model = pipes.info(FAMILY)
    monkeypatch.setattr(LocalExecutor, "available_bytes", lambda config: available)
    check_ranks(args, model, pipes.config(model, device=device), read_config(resolve(args), args), LocalExecutor)


def test_one_gpu_that_holds_the_model_runs_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        ask(4, weights(), monkeypatch)
    (said,) = caplog.messages
    assert "tensor_parallel_size=4" in said
    assert "one GPU" in said


def test_one_that_does_not_is_refused_with_both_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError) as caught:
        ask(2, weights() - 1, monkeypatch)
    assert caught.value.param == "tensor_parallel_size"
    said = str(caught.value)
    assert "tensor_parallel_size=2" in said
    assert f"{weights() / 2**30:.2f} GiB" in said
    assert "more memory" in said


def test_one_is_not_measured(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        ask(1, 0, monkeypatch)
    assert not caplog.messages


def test_a_cpu_is_not_split(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        ask(2, 0, monkeypatch, "cpu")
    assert ["has no effect on a CPU" in line for line in caplog.messages] == [True]


def test_a_cpu_holds_no_stages(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The options are named as they were asked for."""
    with caplog.at_level(logging.WARNING):
        ask(1, 0, monkeypatch, "cpu", pipeline_parallel_size=3)
        ask(2, 0, monkeypatch, "cpu", pipeline_parallel_size=3)
    assert [line.partition(" no effect")[0] for line in caplog.messages] == [
        "pipeline_parallel_size=3 has",
        "tensor_parallel_size=2 and pipeline_parallel_size=3 have",
    ]


@pytest.mark.parametrize(
    ("device", "backend", "num_devices", "wanted"),
    [
        ("cpu", None, 1, 1),
        ("cpu", "mp", 1, 2),
        ("cuda", None, 2, 2),
        ("cuda", "ray", 1, 2),
        ("cpu", "ray", 1, 2),
        ("cuda", None, 1, 1),
        ("cuda", "uni", 2, 1),
    ],
)
def test_ranks_are_as_many_as_gpus_or_asked_for(
    device: str, backend: str | None, num_devices: int, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_devices)
    monkeypatch.setattr(engine_ranks, "need_ray", lambda asking, param: None)
    args = EngineArgs(tensor_parallel_size=2, distributed_executor_backend=backend)
    assert ranks_of(args, pipes.info("llama"), device) == (wanted, 1)


def test_without_ray_one_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    args = EngineArgs(tensor_parallel_size=2, distributed_executor_backend="ray")
    with pytest.raises(ConfigError, match="with 2 ranks needs Ray") as caught:
        ranks_of(args, pipes.info("llama"), "cpu")
    assert "pip install 'beheld[ray]'" in str(caught.value)
    assert caught.value.param == "distributed_executor_backend"


def test_one_rank_needs_no_ray(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with caplog.at_level(logging.INFO):
        assert ranks_of(EngineArgs(distributed_executor_backend="ray"), pipes.info("llama"), "cpu") == (1, 1)
    assert ["no effect with one rank" in line for line in caplog.messages] == [True]


@pytest.mark.parametrize(("encodes", "wanted"), [(False, 2), (True, 1)])
def test_a_model_that_gpus_cannot_share_runs_on_one(
    encodes: bool, wanted: int, caplog: pytest.LogCaptureFixture
) -> None:
    info = replace(pipes.info("llama"), pooler=PoolerInfo(encodes=encodes))
    config = replace(pipes.config(info, device="cuda"), tensor_parallel_size=2)
    with caplog.at_level(logging.WARNING):
        found = with_fitting_ranks(EngineArgs(tensor_parallel_size=2), info, config)
    assert found.tensor_parallel_size == wanted
    assert ["an encoder" in line for line in caplog.messages] == [True] * (2 - wanted)


@pytest.mark.parametrize("through", ["engine", "plan"])
def test_every_way_in_asks(through: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from beheld.engine import setup
    from beheld.tools.plan import describe

    def refuse(args: EngineArgs, *found: Any) -> None:
        raise ConfigError(f"asked for {args.tensor_parallel_size}")

    monkeypatch.setattr(setup, "check_ranks", refuse)
    options: dict[str, Any] = {"model": str(tiny.checkpoint(FAMILY)), "device": "cpu", "tensor_parallel_size": 3}
    with pytest.raises(ConfigError, match="asked for 3"):
        LLM(**options) if through == "engine" else describe(EngineArgs(**options))


def test_torchruns_processes_have_the_whole_model_on_a_cpu_alone() -> None:
    args = EngineArgs(
        tensor_parallel_size=2, pipeline_parallel_size=2, distributed_executor_backend="external_launcher"
    )
    assert ranks_of(args, pipes.info("llama"), "cpu") == (1, 1)
    with pytest.raises(ConfigError, match="built for CPUs alone"):
        ranks_of(args, pipes.info("llama"), "cuda")
    engines = replace(args, tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=2)
    check(engines)
    assert ranks_of(engines, pipes.info("llama"), "cpu") == (1, 1)
    with pytest.raises(ConfigError, match="built for CPUs alone"):
        ranks_of(engines, pipes.info("llama"), "cuda")
    with pytest.raises(ConfigError, match="Start without torchrun"):
        start_processes(engines)


def test_torchruns_processes_are_as_many_as_ranks_and_engines() -> None:
    """Started without torchrun, or in another number, LLM says with how many, and starts no engine of its own."""
    options: dict[str, Any] = {
        "model": str(tiny.checkpoint("llama")),
        "distributed_executor_backend": "external_launcher",
    }
    with pytest.raises(ConfigError, match="--nproc-per-node=4"):
        LLM(**options, data_parallel_size=2, tensor_parallel_size=2)


@pytest.mark.parametrize("group", ["gloo", "cuda:gloo"])
def test_torchruns_processes_meet(group: str, tmp_path: Path) -> None:
    """In a group that the script made, of GPUs alone too; on any seed that may be given."""
    with pytest.raises(ConfigError, match="it has not started this one") as caught:
        agreed_seed(4, 7)
    assert "torchrun --nproc-per-node=4" in str(caught.value)
    dist.init_process_group(group, store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        for seed in (2**62 + 1, 2**64 - 1, -(2**63)):
            assert agreed_seed(1, seed) == seed
        with pytest.raises(ConfigError, match="started 1 processes, and the options speak of 2"):
            agreed_seed(2, 7)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ({"data_parallel_size": 2}, "data_parallel_size"),
        ({"enforce_eager": False}, "enforce_eager"),
        ({"kv_cache_memory_bytes": None}, "kv_cache_memory_bytes"),
    ],
)
def test_ranks_that_share_a_gpu_need_to_know_how(
    more: dict[str, Any], param: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They cannot send to a stage, record sums by way of the host, or know what others leave of the memory."""
    monkeypatch.setenv("BEHELD_ONE_GPU", "1")
    right = {"tensor_parallel_size": 2, "enforce_eager": True, "kv_cache_memory_bytes": 2**28}
    model = pipes.info(FAMILY)
    assert ranks_of(EngineArgs(**right), model, "cuda") == (2, 1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as caught:
        ranks_of(EngineArgs(**right | more), model, "cuda")  # type: ignore[arg-type]
    assert caught.value.param == param
