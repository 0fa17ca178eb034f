"""Long traffic of small requests, and what memory the server has after each thousand of them; one JSON line a mark.

    python -m benchmarks.serving soak --count 100000 --warm 40000

Most requests ask for one token: completions of 1 to 32 ids, chats, chats about one of a few images, streams, schemas,
stored responses, token counts. One in ten is refused, and one in twenty is left before its answer ends. Everything that
has a bound fills first: the KV cache is small, and `--warm` requests pass before the slope is taken.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import http.client
import io
import json
import os
import random
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.serving_hostile import CHAT, COMPLETE, KEY, post

_MARK = 1000
_THREADS = 4
_HEADERS = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
# GiB; filled by some 20,000 short requests.
_KV_CACHE_GIB = "0.125"


def soak(
    given: argparse.Namespace,
    begun: Callable[..., tuple[subprocess.Popen[bytes], int]],
    memory: Callable[[str, int], dict[str, float]],
    slope: Callable[[list[tuple[int, float]]], float],
) -> Iterator[dict[str, Any]]:
    """Marks while the traffic goes on, then the slopes after `--warm` requests, in MiB for each thousand."""
    os.environ.setdefault("BEHELD_CPU_KV_CACHE_GIB", _KV_CACHE_GIB)
    process, port = begun(given, "--max-model-len", "1024")
    traffic = Traffic(port, given.count, given.rate)
    marks: list[tuple[int, dict[str, float]]] = []
    begin = time.monotonic()
    try:
        traffic.warm_up()
        threads = [threading.Thread(target=traffic.run, args=(number,), daemon=True) for number in range(_THREADS)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            time.sleep(0.5)
            if traffic.count >= _MARK * (len(marks) + 1):
                marks.append((traffic.count, memory(f"http://127.0.0.1:{port}/v1", process.pid)))
                found = {name: round(value, 2) for name, value in marks[-1][1].items()}
                yield {"requests": marks[-1][0], "seconds": round(time.monotonic() - begin), **found}
    finally:
        traffic.stop.set()
        process.kill()
        process.wait()
    late = [mark for mark in marks if mark[0] >= given.warm]
    names = late[0][1] if late else {}
    yield {
        "requests": traffic.count,
        "after": given.warm,
        "statuses": dict(traffic.statuses),
        "mib_per_1000": {name: round(slope([(count, found[name]) for count, found in late]), 3) for name in names},
    }


class Traffic:
    """Requests of several threads, each with its own connection, until there were `most`; at most `rate` a second."""

    def __init__(self, port: int, most: int, rate: float = 0.0) -> None:
        self._port = port
        self._most = most
        self._pause_s = 1 / rate if rate else 0.0
        self._next = 0.0
        self._images = [_image(seed) for seed in range(12)]
        self._lock = threading.Lock()
        self.stop = threading.Event()
        self.count = 0
        self.statuses: Counter[str] = Counter()

    def warm_up(self) -> None:
        """Wait until the server answers."""
        link = self._link()
        link.request("POST", COMPLETE, json.dumps({"prompt": [50], "max_tokens": 1}), _HEADERS)
        answer = link.getresponse()
        assert answer.status == 200, answer.read()
        link.close()

    def run(self, number: int) -> None:
        """The traffic of one thread."""
        rng = random.Random(number)
        link = self._link()
        while not self.stop.is_set():
            with self._lock:
                if self.count >= self._most:
                    return
                self.count += 1
                self._next = max(self._next + self._pause_s, time.monotonic())
                due = self._next
            time.sleep(max(0.0, due - time.monotonic()))
            try:
                chance = rng.random()
                if chance < 0.05:
                    status = self._leave(rng)
                else:
                    path, body = self._bad(rng) if chance < 0.15 else self._good(rng)
                    link.request("POST", path, json.dumps(body), _HEADERS)
                    answer = link.getresponse()
                    answer.read()
                    status = str(answer.status)
            except (OSError, http.client.HTTPException) as error:
                link.close()
                link, status = self._link(), type(error).__name__
            with self._lock:
                self.statuses[status] += 1

    def _link(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self._port, timeout=300)

    def _leave(self, rng: random.Random) -> str:
        body = {"prompt": _ids(rng), "max_tokens": 200, "stream": True, "ignore_eos": True}
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), 300) as link:
            link.sendall(post(COMPLETE, body))
            link.recv(10)
        return "left"

    def _good(self, rng: random.Random) -> tuple[str, dict[str, Any]]:
        said = [{"role": "user", "content": f"{rng.randrange(10**6)}"}]
        kind = rng.randrange(20)
        if kind == 0:
            parts = [{"type": "image_url", "image_url": {"url": rng.choice(self._images)}}]
            return CHAT, {"messages": [{"role": "user", "content": parts}], "max_tokens": 1}
        if kind == 1:
            return CHAT, {"messages": said, "max_tokens": 2, "structured_outputs": {"regex": "[0-9]{2}"}}
        if kind == 2:
            return "/v1/responses", {"input": said[0]["content"], "max_output_tokens": 1}
        if kind == 3:
            return "/tokenize", {"messages": said}
        if kind == 4:
            return CHAT, {"messages": said, "max_tokens": 2, "logprobs": True, "top_logprobs": 3}
        if kind <= 8:
            return CHAT, {"messages": said, "max_tokens": 1, "stream": kind == 8}
        return COMPLETE, {"prompt": _ids(rng), "max_tokens": 1, "stream": kind > 16}

    def _bad(self, rng: random.Random) -> tuple[str, dict[str, Any]]:
        kind = rng.randrange(4)
        if kind == 0:
            return COMPLETE, {"prompt": "x", "temperature": -rng.random()}
        if kind == 1:
            return CHAT, {"messages": [], f"unknown_{rng.randrange(10**6)}": 1}
        if kind == 2:
            return COMPLETE, {"prompt": [10**9 + rng.randrange(10**6)], "max_tokens": 1}
        broken = base64.b64encode(rng.randbytes(64)).decode()
        parts = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{broken}"}}]
        return CHAT, {"messages": [{"role": "user", "content": parts}], "max_tokens": 1}


def _ids(rng: random.Random) -> list[int]:
    return [rng.randrange(50, 250) for _ in range(rng.randrange(1, 32))]


def _image(seed: int) -> str:
    from PIL import Image

    file = io.BytesIO()
    Image.effect_noise((56 + 28 * (seed % 3), 84), 40 + seed).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
