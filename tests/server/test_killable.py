"""What clients' media do to the processes that open them, told through HTTP (cases 31 and 61)."""

from __future__ import annotations

import base64
import contextlib
import itertools
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from beheld.inputs.media import decode, tasks, video
from beheld.sandbox.task_type import WorkerFault
from beheld.sandbox.worker_group import WorkerGroup
from tests import tiny
from tests.inputs import pipes
from tests.server.running import ENGINE, Running, data_url, request_bytes, talk
from tests.server.slowness import slowness

CHAT = "/v1/chat/completions"
# A worker may take this long for an item.
WORK_S = 2.5
LIMITS = {"work_timeout_s": dict.fromkeys(("image", "video"), WORK_S), "max_work_bytes": 192 << 20}


@pytest.fixture(scope="module", params=["thread", "process"])
def small(request: pytest.FixtureRequest) -> Iterator[Running]:
    """A server as it is by default, but for what its workers may take; with its engine in either place."""
    found = Running(engine=ENGINE | {"engine": request.param, "media_limits": LIMITS})
    # What is loaded with the first item is loaded.
    assert found.post(CHAT, asking(unseen())).status_code == 200
    yield found
    found.idle()
    found.close()


SEEDS = itertools.count(1)


def unseen() -> str:
    """A picture that no cache holds."""
    return data_url(seed=next(SEEDS))


def asking(url: str, kind: str = "image_url") -> dict[str, Any]:
    content = [{"type": kind, kind: {"url": url}}, {"type": "text", "text": "x"}]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 1}


def group_of(server: Running) -> WorkerGroup:
    inputs = server.llm._inputs
    kind = inputs.workers._decode_type
    assert kind is not None, "media are opened in the server's own process"
    return inputs._sandbox._group(kind)


def stopped(server: Running) -> int:
    """Stop the worker that takes the next item; its number."""
    (number,) = group_of(server).pids()
    os.kill(number, signal.SIGSTOP)
    return number


def until(what: Callable[[], Any], within_s: float = 30.0) -> None:
    deadline = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def is_gone(number: int) -> bool:
    try:
        return Path(f"/proc/{number}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def movie(folder: Path) -> str:
    frames = np.random.default_rng(0).integers(0, 255, (9, 56, 56, 3), dtype=np.uint8)
    data = pipes.write_video(folder / "v.mp4", frames).read_bytes()
    return "data:video/mp4;base64," + base64.b64encode(data).decode()


def serves(server: Running) -> None:
    """It answers a picture that it has not seen, soon; the sandbox has one second, see sandbox/test_sandbox.py."""
    begin = time.monotonic()
    assert server.post(CHAT, asking(unseen())).status_code == 200
    assert time.monotonic() - begin < 2.0 * slowness(), "the pool is whole again"


@pytest.fixture
def any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker has more time than any busy machine takes, so that time ends no work of the test."""
    monkeypatch.setattr(tasks, "_timeout_s", lambda task, limits: 50.0)


def test_31_nothing_is_decoded_in_the_servers_own_process(
    small: Running, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def here(*_: Any, **__: Any) -> None:
        raise AssertionError("decoded in the server's process")

    for module in (decode, video):
        monkeypatch.setattr(module, "open_bytes", here)
    assert small.post(CHAT, asking(unseen())).status_code == 200
    assert small.post(CHAT, asking(movie(tmp_path), "video_url")).status_code == 200
    (number,) = group_of(small).pids()
    assert number != os.getpid()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV], ids=lambda number: number.name)
def test_31_a_decoder_that_dies_costs_its_request_alone(small: Running, number: int) -> None:
    beside: list[httpx.Response] = []
    told: list[httpx.Response] = []
    text = {"messages": talk("Go on."), "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    calm = small.post(CHAT, text).json()["choices"][0]["message"]["content"]
    worker = stopped(small)
    threads = [
        threading.Thread(target=lambda: told.append(small.post(CHAT, asking(unseen())))),
        threading.Thread(target=lambda: beside.append(small.post(CHAT, text))),
    ]
    for thread in threads:
        thread.start()
    until(lambda: group_of(small)._busy)
    os.kill(worker, number)
    with contextlib.suppress(ProcessLookupError):
        # SIGKILL does not wait for it, and the server may have seen the end.
        os.kill(worker, signal.SIGCONT)
    for thread in threads:
        thread.join()
    assert told[0].status_code == 500
    assert told[0].json()["error"]["code"] == "step_error"
    assert "SIG" not in told[0].text
    assert beside[0].json()["choices"][0]["message"]["content"] == calm
    serves(small)


def test_31_a_decoder_that_stalls_costs_its_request_alone(small: Running) -> None:
    worker = stopped(small)
    begin = time.monotonic()
    answer = small.post(CHAT, asking(unseen()))
    # A small image has a part of the time.
    assert 0.4 * WORK_S <= time.monotonic() - begin < WORK_S + 2.5
    assert answer.status_code == 413
    assert f"more than {0.4 * WORK_S:g}" in answer.json()["error"]["message"]
    assert is_gone(worker)
    serves(small)


@pytest.mark.usefixtures("any_time")
def test_31_a_decoder_that_takes_too_much_memory_costs_its_request_alone(small: Running) -> None:
    picture = pipes.encoded(tiny.picture(64, 64, 3).resize((9000, 9000)), "JPEG")
    answer = small.post(CHAT, asking("data:image/jpeg;base64," + base64.b64encode(picture).decode()))
    assert answer.status_code == 413
    assert "memory" in answer.json()["error"]["message"]
    serves(small)


@pytest.mark.usefixtures("any_time")
@pytest.mark.parametrize("stream", [False, True])
def test_61_who_leaves_takes_the_work_on_their_media_along(
    small: Running, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More clients than there are threads for media, who all leave while the first of them is worked for."""
    faults: list[WorkerFault] = []
    usual = tasks._error

    def noted(task: Any, limits: Any, fault: WorkerFault) -> Exception:
        faults.append(fault)
        return usual(task, limits, fault)

    monkeypatch.setattr(tasks, "_error", noted)
    worker = stopped(small)
    links: list[socket.socket] = []
    for _ in range(24):
        link = small.connect()
        link.sendall(request_bytes(CHAT, asking(unseen()) | {"stream": stream}))
        links.append(link)
    until(lambda: group_of(small)._busy and small.admission.busy == 24)
    for link in links:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        link.close()
    until(lambda: small.admission.busy == 0, 10.0)
    serves(small)
    assert not faults, "work went on to the end of its time"
    assert is_gone(worker)
    assert small.llm._preparation._pools.media._work_queue.qsize() == 0
    assert not group_of(small)._busy
