"""The deployment for Ray Serve: how many replicas, which options, what a replica tells. No test here needs Ray."""

from __future__ import annotations

import asyncio
import gc
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from beheld import serve_ray
from beheld.core.errors import ConfigError
from beheld.serve_ray import KV, QUEUE, Replica, desired, options_of, policy
from beheld.server.stream import until_gone


@pytest.mark.parametrize(
    ("waiting", "kv_use", "wanted"),
    [
        ([0.0], [0.0], 1),
        ([8.0], [0.1], 1),
        ([9.0], [0.1], 2),
        ([0.0], [0.81], 2),
        ([20.0, 20.0], [0.9, 0.9], 5),
        ([0.0, 0.0, 0.0], [0.8, 0.8, 0.8], 3),
        ([0.0, 0.0, 0.0], [0.1, 0.1, 0.1], 1),
    ],
)
def test_replicas_follow_the_queue_and_the_cache(waiting: list[float], kv_use: list[float], wanted: int) -> None:
    assert desired(waiting, kv_use, 1) == wanted


def test_without_reports_nothing_changes() -> None:
    assert policy(SimpleNamespace(aggregated_metrics=None, current_num_replicas=3))[0] == 3
    assert policy(SimpleNamespace(aggregated_metrics={QUEUE: {}}, current_num_replicas=2))[0] == 2


def test_the_policy_reads_what_a_replica_tells() -> None:
    scheduler = SimpleNamespace(num_waiting=12, num_free_blocks=(10, 5), num_blocks=(10, 10))

    async def ping() -> Any:
        return SimpleNamespace(scheduler=scheduler)

    replica = Replica.__new__(Replica)
    replica._llm = SimpleNamespace(ping=ping, alive=False, reason="It died.")  # type: ignore[assignment]
    told = asyncio.run(replica.record_autoscaling_stats())
    assert told == {QUEUE: 12.0, KV: 0.5}
    metrics = {name: {"replica": value} for name, value in told.items()}
    assert policy(SimpleNamespace(aggregated_metrics=metrics, current_num_replicas=1))[0] == 2
    with pytest.raises(RuntimeError, match="It died"):
        replica.check_health()


def test_ray_serve_may_start_and_end_it_before_a_request() -> None:
    sent: list[str] = []

    async def receive() -> Any:
        return {"type": "lifespan.startup"}

    async def send(message: Any) -> None:
        sent.append(message["type"])

    asyncio.run(serve_ray.Entrance()({"type": "lifespan"}, receive, send))
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


def test_arguments_are_options_of_the_engine() -> None:
    given = {"model": "mote", "max-model-len": "256", "enforce_eager": "True", "max_replicas": "3", "dtype": "float32"}
    model, options, bounds = options_of(given | {"limit_mm_per_prompt": '{"image": 2}'})
    assert model == "mote"
    assert options == {
        "max_model_len": 256, "enforce_eager": True, "dtype": "float32", "limit_mm_per_prompt": {"image": 2},
    }  # fmt: skip
    assert bounds == {"min_replicas": 1, "max_replicas": 3}


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"modle": "x"}, "modle"),
        ({"min_replicas": "2"}, "min_replicas"),
        ({"max_replicas": "many"}, "max_replicas"),
    ],
)
def test_wrong_arguments_are_named(given: dict[str, str], param: str) -> None:
    with pytest.raises(ConfigError) as caught:
        options_of(given)
    assert caught.value.param == param


def test_without_ray_one_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'beheld\[ray\]'"):
        serve_ray.app({})


def test_the_end_of_a_request_logs_no_error(caplog: pytest.LogCaptureFixture) -> None:
    async def receive() -> Any:
        raise RuntimeError("the request was cancelled, as Ray Serve says when its answer is complete")

    async def work() -> str:
        return "an answer"

    assert asyncio.run(until_gone(work(), receive)) == "an answer"
    gc.collect()
    assert not caplog.records
