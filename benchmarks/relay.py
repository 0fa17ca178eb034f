"""What a further front costs the process that has the engine: processor time of a relayed request and of a step.

    python -m benchmarks.relay --requests 400 --patches 1024 --rows 64 --steps 400

Three processes: a front that submits, the relay (this one), and an engine that answers without computing. A request has
a prompt of `--tokens` tokens and, with `--patches`, an image of so many patches of Qwen2.5-VL (1176 numbers of two
bytes). A step has an event of each of `--rows` rows.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import threading
import time
from typing import Any

from beheld.core.media import MediaItem, MediaSpan
from beheld.core.outputs import TokenEvent
from beheld.core.request import FinishReason, Request
from beheld.core.sampling import Sampling
from beheld.engine.codec import CODEC
from beheld.engine.columns import columns_of
from beheld.engine.label import label_of
from beheld.engine.messages import Events, Stop, Submit
from beheld.engine.shared_engine import FrontRelay, RelayedEngine, SharedEngine
from beheld.utils.allocator import share_arenas
from beheld.wire.link import Link, end_with, pair


def requests(given: argparse.Namespace, count: int) -> list[Request]:
    """New requests."""
    import torch

    made = []
    for number in range(count):
        spans: tuple[MediaSpan, ...] = ()
        if given.patches:
            features = {
                "pixel_values": torch.zeros(given.patches, 1176, dtype=torch.bfloat16),
                "image_grid_thw": torch.tensor([[1, 32, 32]]),
            }
            digest = number.to_bytes(32, "little")
            ids = tuple([1] * (given.patches // 4))
            item = MediaItem("image", digest, features, {"image_grid_thw": (1, 32, 32)}, ids, None, len(ids))
            spans = (MediaSpan(item, 4, 4 + len(ids)),)
        made.append(Request(f"chatcmpl-{number:032x}", tuple(range(given.tokens)), Sampling(max_tokens=4), spans))
    return made


def front(given: argparse.Namespace, link: Link) -> None:
    """Submit one after the other, each when the one before has begun; then let the engine take its steps."""
    engine = RelayedEngine(link)
    begun, done = threading.Semaphore(given.ahead), threading.Event()
    seen = 0

    def receive(reply: Any) -> None:
        nonlocal seen
        if isinstance(reply, Events):
            seen += len(reply.events)
            if reply.events[0].finish is not None:
                done.set()
            else:
                for _ in reply.events:
                    begun.release()

    engine.start(receive)
    for request in requests(given, given.requests):
        begun.acquire()
        engine.send(Submit((request,)))
    while seen < given.requests:
        time.sleep(0.01)
    print("submitted", flush=True)
    sys.stdin.readline()
    engine.send(Stop("steps"))
    done.wait()
    print(seen - given.requests, flush=True)
    sys.stdin.readline()


def engine(given: argparse.Namespace, link: Link) -> None:
    """Answer each request with a token; on Stop, take the steps of the last requests."""
    names: list[str] = []

    def send(events: list[TokenEvent]) -> None:
        step = Events(tuple(events))
        link.send(columns_of(step), label=label_of(step))

    while True:
        message = link.receive()
        if isinstance(message, Submit):
            names += [request.id for request in message.requests]
            send([TokenEvent(request.id, (5,)) for request in message.requests])
        elif isinstance(message, Stop):
            for number in range(given.steps):
                send([TokenEvent(name, (number,)) for name in names[-given.rows :]])
                time.sleep(0.001)
            send([TokenEvent(name, (), FinishReason.LENGTH) for name in names[-given.rows :]])


def main() -> None:
    """Be the relay, or one of the others."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", nargs="?", default="relay")
    parser.add_argument("file", nargs="?", type=int)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--ahead", type=int, default=4, help="requests that are on their way at a time")
    parser.add_argument("--tokens", type=int, default=282)
    parser.add_argument("--patches", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--steps", type=int, default=400)
    given = parser.parse_args()
    # As in a server.
    share_arenas()
    if given.part != "relay":
        end = socket.socket(fileno=given.file)
        end_with(end)
        {"front": front, "engine": engine}[given.part](given, Link(end, CODEC, 4))
        return
    links, processes = {}, {}
    for part in ("front", "engine"):
        ours, theirs = pair()
        command = [sys.executable, "-m", "benchmarks.relay", part, str(theirs.fileno()), *sys.argv[1:]]
        how: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with theirs:
            processes[part] = subprocess.Popen(command, pass_fds=(theirs.fileno(),), **how)
        links[part] = Link(ours, CODEC, 4)
    shared = SharedEngine(RelayedEngine(links["engine"]))
    shared.start(lambda reply: None)
    kept: Any = processes["front"]
    spent = time.process_time()
    begin = time.monotonic()
    FrontRelay(shared, links["front"], lambda: None)
    kept.stdout.readline()
    report: dict[str, Any] = {"requests": given.requests, "patches": given.patches, "rows": given.rows}
    report["request_ms"] = round(1e3 * (time.process_time() - spent) / given.requests, 3)
    report["request_clock_ms"] = round(1e3 * (time.monotonic() - begin) / given.requests, 3)
    spent = time.process_time()
    kept.stdin.write("\n")
    kept.stdin.flush()
    events = int(kept.stdout.readline())
    report["step_ms"] = round(1e3 * (time.process_time() - spent) / (given.steps + 1), 4)
    report["events"] = events
    print(json.dumps(report))
    for process in processes.values():
        process.kill()
        process.wait()
    os._exit(0)


if __name__ == "__main__":
    main()
