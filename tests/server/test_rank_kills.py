"""A rank that is killed at a random step under the server: no hang, nothing lost or doubled, one error, exit codes."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from beheld.executor.multi import MultiExecutor
from beheld.server import serve
from tests import ranks
from tests.long import LONG, sized
from tests.server.running import Running
from tests.server.test_lifecycle import served

RANKS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "distributed_executor_backend": "mp", "max_model_len": 256, "max_num_seqs": 4,
    "num_gpu_blocks_override": 80, "disable_log_stats": True,
}  # fmt: skip
SPLITS: tuple[dict[str, Any], ...] = (
    {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}, {"tensor_parallel_size": 3}
)  # fmt: skip
BODY: dict[str, Any] = {"model": "tiny", "max_tokens": 40, "temperature": 0, "ignore_eos": True, "stream": True}
CLIENTS = 3
# All clients know of a killed rank by then.
LIMIT_S = 10.0


@dataclass
class Streamed:
    """What a client has seen of one answer."""

    prompt: str
    text: str = ""
    errors: list[dict[str, Any]] = field(default_factory=list)
    finished: bool = False
    done: int = 0
    status: int = 0
    ended_at: float = 0.0
    begun: threading.Event = field(default_factory=threading.Event)

    def ask(self, url: str) -> None:
        """Ask, and take all that comes."""
        try:
            with httpx.stream(
                "POST", url + "/v1/completions", json=BODY | {"prompt": self.prompt}, timeout=60, trust_env=False
            ) as response:
                self.status = response.status_code
                if self.status != 200:
                    self.errors.append(json.loads(response.read())["error"])
                for line in response.iter_lines() if self.status == 200 else ():
                    if line.startswith("data: "):
                        self._take(line.removeprefix("data: "))
        finally:
            self.begun.set()
            self.ended_at = time.monotonic()

    def _take(self, data: str) -> None:
        if data == "[DONE]":
            self.done += 1
            return
        chunk = json.loads(data)
        if "error" in chunk:
            self.errors.append(chunk["error"])
            return
        for choice in chunk["choices"]:
            self.text += choice["text"]
            self.finished |= choice["finish_reason"] is not None
            self.begun.set()


def asked(url: str) -> tuple[list[Streamed], list[threading.Thread]]:
    """Several clients, which have begun to ask."""
    clients = [Streamed(f"Client {number} asks") for number in range(CLIENTS)]
    threads = [threading.Thread(target=each.ask, args=(url,), daemon=True) for each in clients]
    for thread in threads:
        thread.start()
    return clients, threads


def judge(clients: list[Streamed], whole: dict[str, str], killed_at: float, says: str) -> int:
    """Assert that each has its whole answer, or the beginning of it and one error in time; how many have the error."""
    failed = 0
    for each in clients:
        assert each.ended_at - killed_at < LIMIT_S, "a client waited too long"
        assert whole[each.prompt].startswith(each.text), "a token is lost or doubled"
        if each.finished and not each.errors:
            assert each.text == whole[each.prompt]
            assert each.done == 1
            continue
        failed += 1
        (error,) = each.errors
        assert error["code"] == "engine_dead", error
        assert says in error["message"], error
        assert not each.finished
        assert each.status == 503 or each.done == 1
    return failed


@pytest.fixture(scope="module")
def quick() -> Iterator[None]:
    """Ranks start quickly."""
    with ranks.forked():
        yield


@pytest.mark.parametrize(
    "split",
    SPLITS if LONG else SPLITS[:1],
    ids=lambda split: "-".join(f"{name[:6]}{size}" for name, size in split.items()),
)
def test_a_rank_that_is_killed_at_any_step(
    quick: None, split: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """200 times in the long form; each with another rank and another moment."""
    monkeypatch.setattr(serve, "DEAD_S", 0.1)
    draw = random.Random(str(split))
    whole: dict[str, str] = {}
    failed = 0
    for _ in range(sized(1, 67)):
        caplog.clear()
        running = Running("llama", RANKS | split)
        try:
            executor = running.llm._engine._core.executor  # type: ignore[attr-defined]
            assert isinstance(executor, MultiExecutor)
            begin = time.monotonic()
            if not whole:
                clients, threads = asked(running.url)
                for thread in threads:
                    thread.join(60)
                assert all(each.finished and each.done == 1 and not each.errors for each in clients)
                whole = {each.prompt: each.text for each in clients}
                took_s = time.monotonic() - begin
            clients, threads = asked(running.url)
            assert clients[0].begun.wait(30)
            time.sleep(draw.random() * took_s)
            victim = draw.choice(executor._ranks)
            killed_at = time.monotonic()
            os.kill(victim.process.pid, signal.SIGKILL)
            for thread in threads:
                thread.join(LIMIT_S + 5)
            failed += judge(clients, whole, killed_at, f"rank {victim.rank} ")
            # Also if no request was left: the watchdog notices it, and the server ends by itself.
            running._thread.join(LIMIT_S)
            assert not running._thread.is_alive()
            assert not running.llm.alive
            # On a busy machine, a killed process takes a while to go.
            for each in executor._ranks:
                each.process.wait(LIMIT_S)
        finally:
            running.close()
        told = [record.message for record in caplog.records if "The process of rank" in record.message]
        assert told
        assert all(f"rank {victim.rank} " in line for line in told)
    assert failed or not LONG, "no kill hit an answer"


@pytest.mark.skipif(not LONG, reason="starts servers, which takes seconds each")
@pytest.mark.parametrize("engine", ["process", "thread"])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_every_process_of_a_server_with_ranks(which: int, engine: str, tmp_path: Path) -> None:
    """Killing the server ends all; killing the engine (the first rank) or another rank ends the server with 3."""
    if which == 2 and engine == "thread":
        pytest.skip("the server is the first rank")
    log = tmp_path / "log"
    flags = ("--max-model-len", "256", "--engine", engine, "--distributed-executor-backend", "mp", "-tp", "2")
    with log.open("wb") as to, served(*flags, log=to) as (process, port):
        others = _below(process.pid)
        assert len(others) == (2 if engine == "process" else 1)
        victim = [process.pid, *others][which]
        client = Streamed("Tell me")
        body = {name: value for name, value in BODY.items() if name != "model"} | {"max_tokens": 200}
        thread = threading.Thread(target=_stream, args=(client, port, body), daemon=True)
        thread.start()
        assert client.begun.wait(30)
        killed_at = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        thread.join(LIMIT_S)
        assert not thread.is_alive()
        assert process.wait(LIMIT_S + serve.DEAD_S) == (-signal.SIGKILL if which == 0 else 3)
        while any(Path(f"/proc/{each}").exists() for each in others) and time.monotonic() - killed_at < LIMIT_S + 10:
            time.sleep(0.1)
        assert not any(Path(f"/proc/{each}").exists() for each in others)
    if which:
        told = [line for line in log.read_text().splitlines() if "[beheld.server.serve] The engine has died" in line]
        assert len(told) == 1, log.read_text()
        assert "status 3" in told[0]


def _below(pid: int) -> list[int]:
    """The engine's process, if it has its own, and then those of ranks."""
    found: list[int] = []
    for each in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((each / "stat").read_text(encoding="ascii").rpartition(")")[2].split()[1])
            command = (each / "cmdline").read_text(encoding="utf-8") + (each / "comm").read_text(encoding="utf-8")
        except OSError:
            continue
        programs = ("beheld.engine.process", "beheld-engine", "beheld.executor.rank")
        if parent == pid and any(program in command for program in programs):
            found += [int(each.name), *_below(int(each.name))]
    return found


def _stream(client: Streamed, port: int, body: dict[str, Any]) -> None:
    try:
        with httpx.stream(
            "POST", f"http://127.0.0.1:{port}/v1/completions", json=body | {"prompt": client.prompt}, timeout=60,
            trust_env=False,
        ) as response:  # fmt: skip
            for line in response.iter_lines():
                if line.startswith("data: "):
                    client._take(line.removeprefix("data: "))
    except httpx.TransportError:
        # The server itself was killed.
        return
    finally:
        client.begun.set()
