"""A server with two engines: one is killed and replaced while the other serves, and SIGTERM drains both."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from beheld.cli.main import main
from tests import tiny
from tests.server.running import data_url
from tests.server.test_process import children

# Fields of requests that are not streamed.
WHOLE: list[dict[str, Any]] = [
    {},
    {"temperature": 1, "seed": 3},
    {"temperature": 1, "seed": 4, "n": 2},
    {"logprobs": 1},
    {"stop": ["this is not said"]},
    {"max_tokens": 300},
]


class Several:
    """The server's process and a client."""

    def __init__(self, log: Path) -> None:
        command = [sys.executable, "-m", "beheld.cli.main", "serve", str(tiny.checkpoint("qwen2_vl")), "-dp", "2"]
        flags = ["--port", "0", "--num-gpu-blocks-override", "400", "--max-model-len", "2048", "--dtype", "float32"]
        self.log = log
        with open(log, "wb") as file:
            self.process = subprocess.Popen([*command, *flags], stdout=file, stderr=file)
        deadline = time.monotonic() + 240
        while (found := re.search(r"Serving \S+ at (http\S+)", log.read_text())) is None:
            assert self.process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        self.client = httpx.Client(base_url=found[1], timeout=60, trust_env=False)
        self.engines = children(self.process.pid)

    def ask(self, text: str, image: int, max_tokens: int = 12) -> str:
        """A greedy answer, streamed; it ends with "error" if it is broken off."""
        content = [
            {"type": "image_url", "image_url": {"url": data_url(84, 56, seed=image)}},
            {"type": "text", "text": text},
        ]
        body = {
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
        }
        answer = ""
        with self.client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                return "error"
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    return answer + "error"
                for choice in event["choices"]:
                    answer += choice["delta"].get("content") or ""
        return answer

    def ask_whole(self, text: str, **fields: Any) -> list[str]:
        """The answers to a request that is not streamed."""
        body: dict[str, Any] = {"prompt": text, "temperature": 0, "max_tokens": 200, "ignore_eos": True} | fields
        response = self.client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        assert response.json()["usage"]["completion_tokens"] == body["max_tokens"] * fields.get("n", 1)
        return [choice["text"] for choice in response.json()["choices"]]

    def health(self) -> Any:
        response = self.client.get("/health")
        assert response.status_code == 200, response.text
        return response.json()

    def metric(self, name: str) -> float:
        lines = dict(line.rsplit(" ", 1) for line in self.client.get("/metrics").text.splitlines() if line[:1] != "#")
        return float(lines[name])


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Several]:
    made = Several(tmp_path_factory.mktemp("server") / "log")
    yield made
    if made.process.poll() is None:
        made.process.kill()
    made.process.wait()


def test_health_and_metrics_tell_of_each_engine(several: Several) -> None:
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda number: several.ask(f"what {number}", number % 4), range(24)))
    both = [{"engine": i, "state": "serving", "restarts": 0, "requests": 0} for i in range(2)]
    assert several.health() == {"status": "ok", "engines": both}
    for engine in "01":
        assert several.metric(f'beheld_engine{{count="steps",engine="{engine}"}}') > 0
        assert several.metric(f'beheld_kv_blocks{{engine="{engine}",state="all"}}') == 400
        assert several.metric(f'beheld_sequences{{engine="{engine}",state="running"}}') == 0
        assert several.metric(f'beheld_engine_serving{{engine="{engine}"}}') == 1
    repeated = several.metric('beheld_routing{count="num_repeated"}')
    assert repeated >= 19
    assert several.metric('beheld_routing{count="num_found"}') >= 0.95 * repeated


def test_killed_engine_is_replaced_while_the_other_serves(several: Several) -> None:
    numbers = range(24)
    calm = [several.ask(f"what {number}", number % 4) for number in numbers]
    calm_whole = [several.ask_whole(f"say {number}", **fields) for number, fields in enumerate(WHOLE)]
    victims = [pid for pid in several.engines if b"engine.process" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(victims) == 2
    with ThreadPoolExecutor(24 + len(WHOLE)) as threads:
        whole = [threads.submit(several.ask_whole, f"say {number}", **fields) for number, fields in enumerate(WHOLE)]
        deadline = time.monotonic() + 30
        while not all(several.metric(f'beheld_sequences{{engine="{i}",state="running"}}') for i in "01"):
            assert time.monotonic() < deadline
        running = [threads.submit(several.ask, f"what {number}", number % 4) for number in numbers]
        time.sleep(0.15)
        os.kill(victims[0], signal.SIGKILL)
        found = [each.result() for each in running]
        # Nobody has seen a part of these, so all of them are answered.
        assert [each.result() for each in whole] == calm_whole
    for expected, got in zip(calm, found, strict=True):
        assert got == expected or (got.endswith("error") and expected.startswith(got.removesuffix("error")))
    states = [each["state"] for each in several.health()["engines"]]
    assert "serving" in states
    assert [several.ask(f"what {number}", number % 4) for number in numbers[:6]] == calm[:6]
    deadline = time.monotonic() + 60
    while [each["state"] for each in several.health()["engines"]] != ["serving", "serving"]:
        assert time.monotonic() < deadline, several.log.read_text()
        time.sleep(0.1)
    assert sum(each["restarts"] for each in several.health()["engines"]) == 1
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda number: several.ask(f"what {number}", number % 4), numbers)) == calm


def test_sigterm_drains_both_engines(several: Several) -> None:
    with ThreadPoolExecutor(6) as threads:
        running = [threads.submit(several.ask, f"go on {number}", number, 300) for number in range(6)]
        deadline = time.monotonic() + 30
        while sum(each["requests"] for each in several.health()["engines"]) < 6:
            assert time.monotonic() < deadline
        left = children(several.process.pid)
        several.process.send_signal(signal.SIGTERM)
        assert not any(each.result().endswith("error") for each in running)
    assert several.process.wait(20) == 0
    assert not [pid for pid in left if Path(f"/proc/{pid}").exists()]


def test_engine_in_a_thread_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "-dp", "2", "--engine", "thread"]) != 0
    assert "--engine thread is for one engine" in capsys.readouterr().err
