"""Jobs and servers in a real Ray cluster, amid which processes are killed. Skipped without Ray."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.cluster.nodes import start_cluster
from tests.long import LONG

ray = pytest.importorskip("ray")
pytestmark = [
    pytest.mark.skipif(not LONG, reason="a cluster takes half a minute to start"),
    pytest.mark.filterwarnings("ignore"),
]

ENGINE = ["--device", "cpu", "--max-model-len", "256", "--num-gpu-blocks-override", "80"]
ITEMS = 1200


@pytest.fixture(scope="module")
def environment() -> Iterator[dict[str, str]]:
    """What a process of a cluster of two nodes of one core each sees."""
    small = {"num_cpus": 1, "object_store_memory": 100 << 20}
    made = start_cluster(small | {"include_dashboard": False}, small)
    yield os.environ | {"RAY_ADDRESS": made.address, "OMP_NUM_THREADS": "1"}
    made.shutdown()


def asked(number: int) -> str:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": f"Say {number}"}], "max_tokens": 24}
    if number % 97 == 5:
        body["wrong"] = 1
    call = {"custom_id": f"n{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
    return json.dumps(call)


def job(source: Path, target: Path, environment: dict[str, str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "beheld", "batch", str(source), str(target), "--ray", "--resume", *ENGINE]
    command += ["--data-parallel-size", "2"]
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for(fact: Callable[[], Any], process: subprocess.Popen[str], within_s: float = 150.0) -> None:
    """Wait until something is so, while a process runs."""
    until = time.monotonic() + within_s
    while not fact():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.02)


def actors(name: str) -> list[psutil.Process]:
    """The processes of Ray's actors with a name."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        title = " ".join(process.info["cmdline"] or ())
        if title.startswith("ray::") and name in title:
            found.append(process)
    return found


def test_a_job_whose_processes_are_killed_has_each_item_once(tmp_path: Path, environment: dict[str, str]) -> None:
    """Twice the process that writes, at a random moment; then, in the run that ends it, an engine."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(map(asked, range(ITEMS))) + "\n{broken\n")
    draw = random.Random(1)
    for _ in range(2):
        # The broken line has no need of an engine.
        before = lines(target) + 1
        with job(source, target, environment) as process:
            wait_for(lambda before=before: lines(target) > before, process)
            time.sleep(draw.random())
            process.kill()
    before = lines(target)
    assert 64 < before < ITEMS - 64
    with job(source, target, environment) as process:
        wait_for(lambda: lines(target) > before, process)
        actors("Answerer")[0].send_signal(signal.SIGKILL)
        _, said = process.communicate(timeout=200)
        assert process.returncode == 0, said
        assert "Progress bars" not in said
    found = [json.loads(line) for line in target.read_bytes().splitlines()]
    counted = collections.Counter(line["custom_id"] for line in found)
    assert counted == collections.Counter([None, *(f"n{number}" for number in range(ITEMS))])
    failed = {line["custom_id"] for line in found if line["error"] is not None}
    assert failed == {None, *(f"n{number}" for number in range(5, ITEMS, 97))}


@contextlib.contextmanager
def served(environment: dict[str, str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A deployment as the page on several hosts starts it, once it answers."""
    command = [str(Path(sys.executable).with_name("serve")), "run", "beheld.serve_ray:app", "model=mote", "device=cpu"]
    command += ["max_model_len=2048", "num_gpu_blocks_override=200"]
    command += [f"{name}={value}" for name, value in options.items()]
    with subprocess.Popen(command, env=environment, text=True, stdout=subprocess.DEVNULL) as process:
        try:
            wait_for(lambda: answer(8), process)
            yield process
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)


def test_ray_serve_adds_a_replica_and_replaces_one_that_is_killed(environment: dict[str, str]) -> None:
    with served(environment, max_replicas=2, max_num_seqs=1) as process:
        wanted = answer(8)
        (replica,) = actors("ServeReplica")
        ended = threading.Event()
        asking = [threading.Thread(target=keep_asking, args=(ended,)) for _ in range(20)]
        for thread in asking:
            thread.start()
        try:
            wait_for(lambda: len(actors("ServeReplica")) == 2, process)
        finally:
            ended.set()
            for thread in asking:
                thread.join()
        for each in (replica, *actors("ServeReplica")):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        wait_for(lambda: answer(8) == wanted, process)
        assert all(each.pid != replica.pid for each in actors("ServeReplica"))


def test_ray_serve_replaces_a_replica_whose_engine_is_dead(environment: dict[str, str]) -> None:
    with served(environment, tensor_parallel_size=2, distributed_executor_backend="mp") as process:
        wanted = answer(8)
        (replica,) = actors("ServeReplica")
        (rank,) = replica.children()
        rank.kill()
        wait_for(lambda: not replica.is_running(), process)
        wait_for(lambda: answer(8) == wanted, process)


def answer(tokens: int) -> str | None:
    """What the server answers; None if it does not."""
    body: dict[str, Any] = {"model": "mote", "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    body["messages"] = [{"role": "user", "content": "Hello"}]
    with contextlib.suppress(httpx.HTTPError):
        got = httpx.post("http://127.0.0.1:8000/v1/chat/completions", json=body, timeout=60)
        if got.status_code == 200:
            text: str = got.json()["choices"][0]["message"]["content"]
            return text
    return None


def keep_asking(ended: threading.Event) -> None:
    while not ended.is_set():
        answer(300)
