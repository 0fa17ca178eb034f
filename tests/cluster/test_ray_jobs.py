"""Jobs and servers in a real Ray cluster, amid which processes are killed. Skipped without Ray."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
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
ITEMS = 400


@pytest.fixture(scope="module")
def environment() -> Iterator[dict[str, str]]:
    """What a process of a cluster of two nodes of one core each sees."""
    small = {"num_cpus": 1, "object_store_memory": 100 << 20}
    made = start_cluster(small | {"include_dashboard": False}, small)
    yield os.environ | {"RAY_ADDRESS": made.address, "OMP_NUM_THREADS": "1"}
    made.shutdown()


def asked(number: int) -> str:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": f"Say {number}"}], "max_tokens": 4}
    if number % 97 == 5:
        body["wrong"] = 1
    call = {"custom_id": f"n{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
    return json.dumps(call)


def job(source: Path, target: Path, environment: dict[str, str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "beheld", "batch", str(source), str(target), "--ray", "--resume", *ENGINE]
    command += ["--data-parallel-size", "2"]
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def wait_for(fact: Callable[[], Any], process: subprocess.Popen[str], within_s: float = 150.0) -> None:
    until = time.monotonic() + within_s
    while not fact():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.01)


def answerers() -> list[psutil.Process]:
    """The processes of Ray in which a job's engines are."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if "Answerer" in process.name() or "Answerer" in " ".join(process.cmdline()):
                found.append(process)
    return found


def test_a_job_whose_processes_are_killed_has_each_item_once(tmp_path: Path, environment: dict[str, str]) -> None:
    """Twice the process that writes, at a random moment; then, in the run that ends it, an engine."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(map(asked, range(ITEMS))) + "\n{broken\n")
    draw = random.Random(1)
    for _ in range(2):
        before = target.stat().st_size if target.exists() else 0
        with job(source, target, environment) as process:
            wait_for(lambda before=before: target.exists() and target.stat().st_size > before, process)
            time.sleep(draw.random() * 0.5)
            process.kill()
    begun = target.stat().st_size
    with job(source, target, environment) as process:
        wait_for(lambda: target.stat().st_size > begun and answerers(), process)
        answerers()[0].send_signal(signal.SIGKILL)
        _, said = process.communicate(timeout=240)
        assert process.returncode == 0, said
    lines = [json.loads(line) for line in target.read_bytes().splitlines()]
    counted = collections.Counter(line["custom_id"] for line in lines)
    assert counted == collections.Counter([None, *(f"n{number}" for number in range(ITEMS))])
    failed = {line["custom_id"] for line in lines if line["error"] is not None}
    assert failed == {None, *(f"n{number}" for number in range(5, ITEMS, 97))}


def test_ray_serve_answers_scales_and_replaces_a_replica(environment: dict[str, str]) -> None:
    serve = Path(sys.executable).with_name("serve")
    if not serve.exists():
        pytest.skip(f"no {serve.name} beside the interpreter")
    command = [str(serve), "run", "beheld.serve_ray:app", "model=mote", "max_replicas=2", "device=cpu"]
    command += ["max_model_len=2048", "num_gpu_blocks_override=200", "max_num_seqs=1", "engine=thread"]
    body = {"model": "mote", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "temperature": 0}
    with subprocess.Popen(command, env=environment, text=True, stdout=subprocess.DEVNULL) as process:
        try:
            with httpx.Client(base_url="http://127.0.0.1:8000", timeout=60) as client:

                def answer() -> str | None:
                    with contextlib.suppress(httpx.HTTPError):
                        got = client.post("/v1/chat/completions", json=body)
                        if got.status_code == 200:
                            text: str = got.json()["choices"][0]["message"]["content"]
                            return text
                    return None

                wait_for(answer, process)
                first = answer()
                assert first
                assert answer() == first
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)
