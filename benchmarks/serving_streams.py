"""What a streamed token costs the server's own process, with an engine that only hands out tokens.

The server is the real one, with its engine in a process. That process loads the model's configuration, but computes
nothing: each answer repeats its prompt, a token for every stream at each of `rate` steps a second. The clients, in this
process, read bytes and count events.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from beheld.core.outputs import TokenEvent
from beheld.core.request import FinishReason, Request

# What the answers repeat: words of several lengths, numbers and characters of two and three bytes.
_TEXT = (
    "The café at the corner opens at 8:30, and its owner – a quiet man of sixty – reads the newspaper until the first "
    'guests arrive. "Two coffees, please," they say; he nods, writes 2 × 3.40 € on a slip of paper and turns around.\n'
)
_EVENT = b"data: "
# Template's tokens at either end of a prompt, which may be special ones.
_ENDS = 12


def streams(given: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of the server's processor time for a request and for a thousand events of its streams.

    A round asks once with each client. What is spent until every stream has begun counts for the requests, what is
    spent from then until every stream has ended for its events; the engine waits in between. The first round warms.
    """
    rounds = []
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["--clients", str(given.clients), "--tokens", str(given.tokens), "--token-rate", str(given.token_rate)]
    words += ["--fronts", str(given.fronts)]
    command = [*given.prefix.split(), sys.executable, "-m", "benchmarks.serving_streams", "front", str(port), *words]
    quiet = {**os.environ, "BEHELD_LOG_LEVEL": "ERROR"}
    front = subprocess.Popen([*command, *(("--model", given.model) if given.model else ())], env=quiet)
    try:
        _await(port, front)
        for number in range(1 + given.rounds):
            line = _round(given, port, front.pid)
            if number:
                rounds.append(line)
    finally:
        front.kill()
        front.wait()
    best = {name: min(line[name] for line in rounds) for name in ("request_ms", "thousand_events_ms")}
    return {"clients": given.clients, "tokens": given.tokens, "rounds": rounds, "least": best}


def _await(port: int, front: subprocess.Popen[bytes]) -> None:
    while front.poll() is None:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=60) as link:
                link.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                if b" 200 " in link.recv(64):
                    return
        except OSError:
            time.sleep(0.1)
    raise SystemExit("the server ended before it listened")


def _round(given: argparse.Namespace, port: int, pid: int) -> dict[str, float]:
    body = {
        "messages": [{"role": "user", "content": _TEXT}],
        "max_tokens": given.tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        **json.loads(given.fields),
    }
    data = json.dumps(body).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(data)
    chosen, events, begun, size = selectors.DefaultSelector(), 0, set(), 0
    spent, first_spent, main_spent = _spent_s(pid), 0.0, _own_spent_s(pid)
    for _ in range(given.clients):
        link = socket.create_connection(("127.0.0.1", port), timeout=60)
        chosen.register(link, selectors.EVENT_READ)
        link.sendall(head + data)
    first_events, first_at = 0, 0.0
    while chosen.get_map():
        for key, _ in chosen.select(60):
            answer: Any = key.fileobj
            piece = answer.recv(1 << 16)
            size += len(piece)
            events += piece.count(_EVENT)
            if not piece:
                chosen.unregister(answer)
                answer.close()
            elif key.fd not in begun and b'"content":"' in piece:
                begun.add(key.fd)
                if len(begun) == given.clients:
                    first_spent, first_events, first_at = _spent_s(pid), events, time.monotonic()
    whole, took = _spent_s(pid), time.monotonic() - first_at
    rest = events - first_events
    return {
        "events": rest,
        "bytes": size,
        "seconds": round(took, 2),
        "request_ms": round(1e3 * (first_spent - spent) / given.clients, 3),
        "thousand_events_ms": round(1e6 * (whole - first_spent) / rest, 2),
        "busy": round((whole - first_spent) / took, 3),
        # Of all that was spent, what the first front spent, which is all where there is one.
        "first_front": round((_own_spent_s(pid) - main_spent) / (whole - spent), 3),
    }


def _spent_s(pid: int) -> float:
    """Seconds of processor time of a process and of the further fronts that it has started, without other children."""
    return sum(_own_spent_s(each) for each in (pid, *further_fronts(pid)))


def _own_spent_s(pid: int) -> float:
    total = 0
    for thread in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{thread}/schedstat") as file:
            total += int(file.read().split()[0])
    return total / 1e9


def further_fronts(pid: int) -> list[int]:
    """The processes of a server's further fronts."""
    found = []
    for thread in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{thread}/children") as file:
            children = [int(word) for word in file.read().split()]
        for child in children:
            with open(f"/proc/{child}/cmdline", "rb") as file:
                found += [child] if b"beheld.cli.front" in file.read().split(b"\0") else []
    return found


def front(given: argparse.Namespace) -> None:
    """Be the server."""
    from beheld.api.async_llm import AsyncLLM
    from beheld.api.start import start_processes
    from beheld.cli.fronts import Fronts
    from beheld.core.config import EngineArgs
    from beheld.engine.process import Spawned
    from beheld.server.listen import listen
    from beheld.server.options import ServerOptions
    from beheld.server.serve import run
    from beheld.utils.gc_tuning import paused_collector, set_aside
    from beheld.wire.link import pair

    options = ServerOptions(port=given.port, names=("streams",), max_answers=max(64, given.clients))
    listener = listen(options)
    ours, theirs = pair()
    command = [sys.executable, "-m", "benchmarks.serving_streams", "engine", str(theirs.fileno())]
    command += ["--clients", str(given.clients), "--token-rate", str(given.token_rate)]
    with theirs:
        engine = Spawned(subprocess.Popen(command, pass_fds=(theirs.fileno(),)), ours)
    options_of_engine: dict[str, Any] = {"max_num_seqs": given.clients, "seed": 0, "disable_log_stats": True}
    if given.fronts == 1:
        with paused_collector():
            llm = AsyncLLM(given.model, engine=engine, **options_of_engine)
        set_aside()
        run(llm, options, listener)
        return
    args = EngineArgs.from_keywords({"model": given.model, **options_of_engine})
    fronts = Fronts(given.fronts, args, options, listener)
    with paused_collector():
        remote = start_processes(args, [engine], fronts.neighbours.place, fronts.warm)
        llm = AsyncLLM(given.model, engine=remote, **options_of_engine)
    set_aside()
    shared: Any = remote.engine
    fronts.join(shared, remote.info, remote.config)
    run(llm, options, listener, fronts.neighbours, fronts)


def engine(given: argparse.Namespace) -> None:
    """Be the engine."""
    from beheld.engine.codec import CODEC
    from beheld.engine.columns import columns_of
    from beheld.engine.label import label_of
    from beheld.engine.messages import Abort, Close, Events, Ping, Pong, Ready, Submit, Tried, TryItems
    from beheld.engine.setup import start
    from beheld.wire.link import Link, end_with

    end = socket.socket(fileno=given.port)
    end_with(end)
    link = Link(end, CODEC)
    setup = start(link.receive())
    link.send(Ready(setup.info, setup.config))
    came: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def listen() -> None:
        with contextlib.suppress(EOFError):
            while True:
                came.put(link.receive())

    threading.Thread(target=listen, daemon=True).start()
    answers: dict[str, tuple[Request, Iterator[tuple[int, ...]]]] = {}
    due, waits = time.monotonic(), True
    while True:
        while not came.empty():
            message = came.get()
            if isinstance(message, Close):
                os._exit(0)
            if isinstance(message, Submit):
                for request in message.requests:
                    answers[request.id] = (request, _repeated(request))
                # Each stream begins at once; its next tokens wait for all the others.
                firsts = Events(tuple(TokenEvent(each.id, next(answers[each.id][1])) for each in message.requests))
                link.send(columns_of(firsts), label=label_of(firsts))
            elif isinstance(message, Abort):
                for name in message.request_ids:
                    answers.pop(name, None)
            elif isinstance(message, TryItems):
                link.send(Tried(None))
            elif isinstance(message, Ping):
                link.send(Pong(message.number, setup.core.stats()))
        if len(answers) == given.clients and waits:
            # The clients' process notes what was spent.
            time.sleep(1.0)
            due, waits = time.monotonic(), False
        waits = waits or not answers
        if not waits:
            made = [_event(request, ids) for request, ids in answers.values()]
            for event in made:
                if event.finish is not None:
                    del answers[event.request_id]
            step = Events(tuple(made))
            link.send(columns_of(step), label=label_of(step))
        due += 1 / given.token_rate
        time.sleep(max(0.0, min(due - time.monotonic(), 1.0)))


def _repeated(request: Request) -> Iterator[tuple[int, ...]]:
    """The tokens of an answer, one after another; `max_tokens` of them."""
    params: Any = request.params
    own = request.token_ids[_ENDS:-_ENDS]
    for number in range(params.max_tokens):
        yield (own[number % len(own)],)


def _event(request: Request, ids: Iterator[tuple[int, ...]]) -> TokenEvent:
    token = next(ids, None)
    return TokenEvent(request.id, (), FinishReason.LENGTH) if token is None else TokenEvent(request.id, token)


def main() -> None:
    """Be one of the processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("front", "engine"))
    parser.add_argument("port", type=int)
    parser.add_argument("--model")
    parser.add_argument("--clients", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--token-rate", type=float, default=30.0)
    parser.add_argument("--fronts", type=int, default=1)
    given = parser.parse_args()
    {"front": front, "engine": engine}[given.part](given)


if __name__ == "__main__":
    main()
