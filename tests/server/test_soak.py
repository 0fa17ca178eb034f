"""Load and soak: many clients at once, and long traffic after which no memory is missing (cases by their number)."""

from __future__ import annotations

import json
import os
import random
import re
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any

import pytest

from benchmarks.serving import resident_mib
from tests import tiny
from tests.long import LONG, lasting_s, sized
from tests.server import test_refusals
from tests.server.running import ENGINE, Reachable, Running, data_url, received, request_bytes, serving, talk

CHAT = "/v1/chat/completions"
COMPLETE = "/v1/completions"
# What may be missing after a thousand requests, and the share of requests that are attacks and that are given up.
MIB_PER_1000 = 1.0
ATTACKS, ABORTS = 0.05, 0.2
# Tokens of prompts, at most.
_LONGEST = 64
# A run that is shorter is mostly warm-up.
_WARM_S = 120.0


class Served(Reachable):
    """`beheld serve` in a process of its own, so that nothing but the server is measured.

    In the tests' process the same traffic had 15 to 45 MiB resident more after each thousand requests: earlier tests
    left freed memory there, whose pages had gone back to the system, and the allocator's use of it brings them back.
    """

    def __init__(self, process: subprocess.Popen[bytes], port: int, engine: str) -> None:
        super().__init__(port)
        self._process = process
        self._engine = engine

    def memory(self) -> tuple[float, float]:
        """MiB that the server and its engine hold, and what is resident of all its processes.

        The latter alone would show a leak late: what was freed once stays resident, and is filled first.
        """
        found = re.findall(r'beheld_held_bytes{process="(\w+)"} (\S+)', self.get("/metrics").text)
        assert [name for name, _ in found] == ["server", "engine"]
        # An engine in a thread says what the process that both share holds.
        counted = found[:1] if self._engine == "thread" else found
        return sum(float(value) for _, value in counted) / 2**20, resident_mib(self._process.pid)


@pytest.fixture(scope="module", params=["thread", "process"])
def soaked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of this file's own, whose engine runs in a thread or in a process."""
    flags = {
        "engine": request.param,
        "dtype": "float32",
        "max-num-seqs": "8",
        "num-gpu-blocks-override": "600",
        "max-model-len": "2048",
        "limit-mm-per-prompt": json.dumps(ENGINE["limit_mm_per_prompt"]),
    }
    with serving(tiny.checkpoint("qwen2_vl"), flags, tmp_path_factory.mktemp("soak") / "log") as (process, port):
        found = Served(process, port, request.param)
        yield found
        found.close()


# ---------------------------------------------------------------------- load


def test_79_a_mixed_load_is_answered_without_errors(running: Running) -> None:
    """Text, pictures, schemas and tools from many clients, some of whom go away: every answer is the one that the
    request gets alone. 256 clients for ten minutes in the long form, whose memory must stay flat as well."""
    bodies = _mixed()
    alone = [_told(running, body) for body in bodies]
    wrong: list[Any] = []
    end = time.monotonic() + lasting_s(0.0, 600.0)
    clients = sized(16, 256)
    turns = [0]
    memory: list[tuple[float, float]] = []

    def client(number: int) -> None:
        turn = 0
        while (turn < 6 or time.monotonic() < end) and not wrong:
            which = (number + turn) % len(bodies)
            turns[0] += 1
            turn += 1
            if turn % 6 == 4:
                with running.connect(60.0) as link:
                    link.sendall(request_bytes(CHAT, bodies[which] | {"stream": True}))
                    link.recv(10)
                continue
            try:
                found = _told(running, bodies[which])
            except Exception as error:
                wrong.append((which, repr(error)))
                return
            if found != alone[which]:
                wrong.append((which, found))

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        time.sleep(0.2)
        memory.append((turns[0], resident_mib(os.getpid())))
    for thread in threads:
        thread.join()
    assert not wrong, wrong[:2]
    running.idle(20.0)
    if lasting_s(0.0, 600.0) > _WARM_S:
        assert _slope(memory[len(memory) // 2 :]) < MIB_PER_1000


def _mixed() -> list[dict[str, Any]]:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    return [
        {"messages": talk("One."), "max_tokens": 20, "ignore_eos": True, "temperature": 0},
        {"messages": talk("Two.", data_url(seed=21)), "max_tokens": 20, "ignore_eos": True, "temperature": 0},
        {"messages": talk("Three."), "structured_outputs": {"regex": "[0-9]{12}"}, "max_tokens": 30, "temperature": 0},
        {"messages": talk("Four."), "tools": [tool], "tool_choice": "required", "max_tokens": 60, "temperature": 0},
    ]


def _told(running: Running, body: dict[str, Any]) -> tuple[Any, int]:
    answer = running.post(CHAT, body)
    assert answer.status_code == 200, answer.text
    message = answer.json()["choices"][0]["message"]
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return (message["content"], str(calls)), answer.json()["usage"]["completion_tokens"]


# ---------------------------------------------------------------------- soak


def test_80_long_traffic_leaves_no_memory_behind(soaked: Served) -> None:
    """Answers of all lengths, pictures, clients that go away and attacks, from one client after the other.

    Everything that grows to a bound (compiled products, caches, pools of threads) is warm-up, and how long that takes
    is not known: in the short form one window out of several must be flat, since a leak leaves none. The long form
    goes on for a quarter of an hour and looks at its second half. There, late answers must also be as fast as early
    ones.
    """
    act = traffic(soaked, random.Random(80))
    held: list[tuple[float, float]] = []
    resident: list[tuple[float, float]] = []
    seconds: list[float] = []

    def growth(first: int = 0) -> float:
        return max(_slope(held[first:]), _slope(resident[first:]))

    def window(count: int) -> float:
        first = len(held)
        for number in range(count):
            seconds.append(act())
            if number % 25 == 24:
                soaked.idle()
                now = soaked.memory()
                held.append((len(seconds), now[0]))
                resident.append((len(seconds), now[1]))
        return growth(first)

    begin, whole_s = time.monotonic(), lasting_s(0.0, 900.0)
    for count in range(1, _LONGEST):
        # Every size that a product is compiled for.
        prompt = [100 + count] + [7] * (count - 1)
        assert soaked.post(COMPLETE, {"prompt": prompt, "max_tokens": 1}).status_code == 200
    window(150)
    while LONG and time.monotonic() - begin < whole_s / 2:
        window(200)
    half = len(seconds)
    slopes = [window(250)]
    while LONG and time.monotonic() - begin < whole_s:
        window(200)
    if whole_s > _WARM_S:
        slopes = [growth(half // 25)]
        early, late = _late(seconds[half : (half + len(seconds)) // 2]), _late(seconds[(half + len(seconds)) // 2 :])
        assert late < 1.1 * early + 0.01, (early, late)
    while slopes[-1] >= MIB_PER_1000 and len(slopes) < 4 and whole_s < _WARM_S:
        slopes.append(window(250))
    assert min(slopes) < MIB_PER_1000, (slopes, held, resident)


def traffic(running: Reachable, rng: random.Random) -> Callable[[], float]:
    """One request or attack per call; it gives the seconds that an answer took, 0 for anything else."""
    numbers = {name: next(v for v in values if v is not None) for name, values in test_refusals.NUMBERS.items()}
    attacks = [request_bytes(COMPLETE, {"prompt": "x", name: value}) for name, value in numbers.items()]
    attacks += [
        request_bytes(CHAT, {"messages": talk(), name: value}) for name, value in test_refusals.INTERNAL.items()
    ]
    # A few, which the caches can hold: that these fill is no leak.
    pictures = [data_url(56 + 28 * (seed % 3), 84, seed) for seed in range(6)]

    def body() -> tuple[str, dict[str, Any]]:
        if rng.random() < 0.15:
            return CHAT, {"messages": talk(f"{rng.random()}", rng.choice(pictures)), "max_tokens": 2}
        ids = [rng.randrange(10, 250) for _ in range(rng.randrange(1, _LONGEST))]
        return COMPLETE, {"prompt": ids, "max_tokens": 2, "stream": rng.random() < 0.5}

    def act() -> float:
        chance, (path, made) = rng.random(), body()
        with running.connect() as link:
            begin = time.perf_counter()
            if chance < ATTACKS:
                link.sendall(rng.choice(attacks))
                assert received(link).startswith(b"HTTP/1.1 4")
            elif chance < ATTACKS + ABORTS:
                link.sendall(request_bytes(path, made | {"max_tokens": 500, "stream": True}))
                link.recv(10)
            else:
                link.sendall(request_bytes(path, made))
                answer = received(link)
                assert answer.startswith(b"HTTP/1.1 200"), answer[:300]
                return time.perf_counter() - begin
        return 0.0

    return act


def test_80_a_leak_would_be_seen(soaked: Served) -> None:
    """The same measure of a server that keeps four kilobytes for every request: stored responses, with metadata."""
    act = traffic(soaked, random.Random(81))
    kept = {"input": "x", "max_output_tokens": 1, "metadata": {f"{number}": "x" * 512 for number in range(8)}}
    marks: list[tuple[float, float]] = []
    for number in range(100):
        act()
        assert soaked.post("/v1/responses", kept).status_code == 200
        if number % 25 == 24:
            marks.append((float(number), soaked.memory()[0]))
    assert _slope(marks) > MIB_PER_1000, marks


def _slope(marks: list[tuple[float, float]]) -> float:
    """MiB for each thousand requests: the median of the slopes between all pairs of marks."""
    slopes = [1000 * (b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(marks, 2) if b[0] > a[0]]
    return statistics.median(slopes) if slopes else 0.0


def _late(seconds: list[float]) -> float:
    """The 99th percentile of the answers."""
    answered = sorted(value for value in seconds if value)
    return answered[int(0.99 * len(answered))]
