"""Serving: what the server costs over its engine, answers of many streams, overload, start-up; one JSON line each.

    python -m benchmarks.serving overhead --clients 32 --requests 256      throughput and first token against AsyncLLM
    python -m benchmarks.serving first --requests 100                      one client's first token, against AsyncLLM
    python -m benchmarks.serving own --clients 256 --minutes 10            every stream gets the answer of its own scene
    python -m benchmarks.serving overload --times 10 --seconds 60          goodput when ten times too much is offered
    python -m benchmarks.serving offered --rates 40,80 --seconds 20        requests that come at random times, by rate
    python -m benchmarks.serving streams --clients 128     processor time of a streamed token, without a model
    python -m benchmarks.serving start --rounds 5                          from a new process to its first answer
    python -m benchmarks.serving ladder --clients 1,4,16,32                several numbers of clients
    python -m benchmarks.serving ladder --engine process --serve "--api-server-count 2" --load-processes 2
    python -m benchmarks.serving hostile --seconds 8                       one client attacks: how long others wait
    python -m benchmarks.serving soak --count 100000                       memory after each thousand small requests

Without --model the embedded model is served. `--engine` says where the engine runs, `--url` measures a server that is
running already (ladder, offered, own, overload). `beheld bench serve` is the ladder for any server.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import io
import json
import os
import random
import shlex
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

from beheld.cli import load
from benchmarks.serving_hostile import hostile
from benchmarks.serving_load import spent_s, spread
from benchmarks.serving_soak import soak
from benchmarks.serving_streams import streams

KEY = "EMPTY"


@contextlib.contextmanager
def served(given: argparse.Namespace, *flags: str) -> Iterator[tuple[str, int]]:
    """`beheld serve`, ready: (its address, its process)."""
    if given.url:
        yield given.url.rstrip("/") + "/v1", 0
        return
    process, port = begun(given, *flags)
    try:
        asyncio.run(load.closed_loop(f"http://127.0.0.1:{port}/v1", KEY, [load.body(TALK, 4)], 1))
        yield f"http://127.0.0.1:{port}/v1", process.pid
        process.terminate()
        process.wait(60)
    finally:
        process.kill()
        process.wait()


TALK = [{"role": "user", "content": "Hello."}]


def begun(given: argparse.Namespace, *flags: str) -> tuple[subprocess.Popen[bytes], int]:
    """`beheld serve` as soon as it listens, which is long before it answers: (process, port)."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [*shlex.split(given.prefix), sys.executable, "-m", "beheld.cli.main", "serve"]
    command += [given.model] if given.model else []
    options = ["--port", str(port), "--engine", given.engine, "--max-num-seqs", str(given.max_num_seqs), "--seed", "0"]
    quiet = {**os.environ, "BEHELD_LOG_LEVEL": "ERROR"}
    # Where compiled modules are not kept, half of a start is Python's compiler; installed packages bring them along.
    quiet.pop("PYTHONDONTWRITEBYTECODE", None)
    process = subprocess.Popen([*command, *options, *flags, *shlex.split(given.serve)], env=quiet)
    while process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return process, port
        except OSError:
            time.sleep(0.01)
    raise SystemExit("the server ended before it listened")


def requests(given: argparse.Namespace, count: int, seed: int) -> list[bytes]:
    """New pictures, each with the same question."""
    return list(load.bodies(count, given.tokens, given.side or None, None, seed))


# ---------------------------------------------------------------------- overhead


def overhead(given: argparse.Namespace) -> dict[str, Any]:
    """The same closed loop of clients against the server, and against AsyncLLM in a process without one.

    Several rounds of both alternate, each side in a process of its own, and medians are compared: a busy machine
    changes faster than the two differ.
    """
    rounds: dict[str, list[dict[str, Any]]] = {"server": [], "in_process": []}
    for number in range(given.rounds):
        with served(given) as (url, _):
            asyncio.run(load.closed_loop(url, KEY, requests(given, given.clients, 10_000 + number), given.clients))
            run = asyncio.run(load.closed_loop(url, KEY, requests(given, given.requests, number), given.clients))
            alone = asyncio.run(load.closed_loop(url, KEY, requests(given, 16, 20_000 + number), 1))
            first = load.percentiles(alone[0].first_s)
            rounds["server"].append({**load.report(*run, given.clients), "first_token_alone_ms": first})
        words = [sys.executable, "-m", "benchmarks.serving", "within", *sys.argv[2:], "--seed", str(number)]
        done = subprocess.run(words, check=True, capture_output=True, text=True)
        rounds["in_process"].append(json.loads(done.stdout))

    def median(side: str, *path: str) -> float:
        def value(line: Any) -> float:
            for name in path:
                line = line[name]
            return float(line)

        return statistics.median(value(line) for line in rounds[side])

    report: dict[str, Any] = {"engine": given.engine, "clients": given.clients, "rounds": given.rounds}
    for name, path in (
        ("tokens_per_s", ("tokens_per_s",)),
        ("first_token_ms", ("first_token_ms", "p50")),
        ("first_token_alone_ms", ("first_token_alone_ms", "p50")),
    ):
        report[name] = {side: round(median(side, *path), 2) for side in rounds}
    rate, alone_ms = report["tokens_per_s"], report["first_token_alone_ms"]
    report["throughput_lost"] = round(1 - rate["server"] / rate["in_process"], 4)
    report["first_token_added_ms"] = round(alone_ms["server"] - alone_ms["in_process"], 2)
    report["errors"] = [line["errors"] for line in rounds["server"] if line["errors"]]
    return report


def within(given: argparse.Namespace) -> dict[str, Any]:
    """The closed loop of `overhead` without a server: clients are tasks that read AsyncLLM."""
    return asyncio.run(_within(given))


async def _within(given: argparse.Namespace) -> dict[str, Any]:
    from beheld import AsyncLLM, SamplingParams

    params = SamplingParams(temperature=0, max_tokens=given.tokens, ignore_eos=True)

    async def ask(data: bytes, seen: load.LoadResult) -> None:
        begin = last = time.perf_counter()
        times = []
        async for output in llm.chat(json.loads(data)["messages"], params, pieces="delta"):
            (piece,) = output.outputs
            seen.tokens += len(piece.token_ids)
            if piece.text:
                times.append(time.perf_counter() - last)
                last = time.perf_counter()
        seen.total_s.append(time.perf_counter() - begin)
        seen.first_s += times[:1]
        seen.between_s += times[1:]

    async def loop(datas: list[bytes], clients: int) -> tuple[load.LoadResult, float]:
        seen, waiting = load.LoadResult(), iter(datas)

        async def client() -> None:
            for data in waiting:
                await ask(data, seen)

        begin = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(clients)))
        return seen, time.perf_counter() - begin

    # The engine in a thread: nothing is handed over but a reference.
    async with AsyncLLM(given.model, max_num_seqs=given.max_num_seqs, seed=0, disable_log_stats=True) as llm:
        await loop(requests(given, given.clients, 10_000 + given.seed), given.clients)
        run = await loop(requests(given, given.requests, given.seed), given.clients)
        alone = await loop(requests(given, 16, 20_000 + given.seed), 1)
    first = load.percentiles(alone[0].first_s)
    return {**load.report(*run, given.clients), "first_token_alone_ms": first}


# ---------------------------------------------------------------------- the first token of one client


def first(given: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds to the first text of one client: from AsyncLLM with its engine in a thread, and from servers with
    their engines in a thread and in a process.

    All three live at the same time and are asked in turn, each new picture by all, so that whatever else the machine
    does falls on each alike. Of what a side adds to AsyncLLM, the difference of each picture's times is taken first and
    the median of these then.
    """
    times: dict[str, list[float]] = {"in_process": [], "thread": [], "process": []}
    with contextlib.ExitStack() as sides:
        words = [sys.executable, "-m", "benchmarks.serving", "asked", *sys.argv[2:]]
        child = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        sides.callback(child.kill)
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        urls = {}
        for engine in ("thread", "process"):
            own = argparse.Namespace(**{**vars(given), "engine": engine, "url": None})
            urls[engine], _ = sides.enter_context(served(own))
        order = random.Random(given.seed)
        for number, data in enumerate(requests(given, _COLD + given.requests, given.seed)):
            for side in order.sample(list(times), len(times)):
                if side == "in_process":
                    child.stdin.write(data + b"\n")
                    child.stdin.flush()
                    took = float(child.stdout.readline())
                else:
                    seen, _ = asyncio.run(load.closed_loop(urls[side], KEY, [data], 1))
                    assert seen.first_s, seen.errors
                    took = seen.first_s[0]
                if number >= _COLD:
                    times[side].append(1e3 * took)
    report: dict[str, Any] = {"requests": given.requests, "side": given.side}
    for side, found in times.items():
        ranked = sorted(found)
        report[side] = {"least": ranked[0], "p25": ranked[len(ranked) // 4], "median": statistics.median(ranked)}
        if side != "in_process":
            added = sorted(a - b for a, b in zip(found, times["in_process"], strict=True))
            report[side] |= {"added_p25": added[len(added) // 4], "added_median": statistics.median(added)}
        report[side] = {name: round(value, 2) for name, value in report[side].items()}
    return report


# So many requests find caches of all kinds cold.
_COLD = 8


def asked(given: argparse.Namespace) -> None:
    """AsyncLLM, asked line by line; each answer is the seconds to its first text."""

    async def answer() -> None:
        from beheld import AsyncLLM, SamplingParams

        params = SamplingParams(temperature=0, max_tokens=given.tokens, ignore_eos=True)
        async with AsyncLLM(given.model, max_num_seqs=given.max_num_seqs, seed=0, disable_log_stats=True) as llm:
            print("ready", flush=True)
            while line := await asyncio.to_thread(sys.stdin.readline):
                messages, took = json.loads(line)["messages"], 0.0
                begin = time.perf_counter()
                async for output in llm.chat(messages, params, pieces="delta"):
                    if output.outputs[0].text and not took:
                        took = time.perf_counter() - begin
                print(took, flush=True)

    asyncio.run(answer())


# ---------------------------------------------------------------------- answers of one's own


def own(given: argparse.Namespace) -> dict[str, Any]:
    """Streams about mote's scenes: each answer must be the one that its scene gets alone, and memory stay flat.

    What grows to a bound of its own has its time before: processed pictures while every scene is asked for alone, then
    `--warm` answers of all clients together, which bring most numbers of rows for which products are compiled, and
    touch most of the KV cache. Only then memory is looked at: what is resident, and what the processes hold (freed
    memory stays resident, and is filled first).
    """
    scenes = _scenes(given.scenes, given.tokens)
    order, wrong, strangers, total, all_seen = random.Random(0), 0, 0, 0, load.LoadResult()
    with served(given, "--max-model-len", "2048") as (url, pid):
        alone, _ = asyncio.run(load.closed_loop(url, KEY, scenes, 1))
        assert len(alone.texts) == len(scenes), alone.errors
        texts = [alone.texts[number] for number in range(len(scenes))]

        def turn() -> None:
            nonlocal wrong, strangers, total
            chosen = [order.randrange(len(scenes)) for _ in range(4 * given.clients)]
            seen, _ = asyncio.run(load.closed_loop(url, KEY, [scenes[which] for which in chosen], given.clients))
            for place, text in seen.texts.items():
                wrong += text != texts[chosen[place]]
                strangers += text != texts[chosen[place]] and text in texts
            total += len(chosen)
            all_seen.first_s += seen.first_s
            all_seen.refused_s += seen.refused_s
            for what, count in seen.errors.items():
                all_seen.errors[what] = all_seen.errors.get(what, 0) + count

        while total < given.warm:
            turn()
        memory = [(total, _memory(url, pid))]
        end = time.monotonic() + 60 * given.minutes
        while time.monotonic() < end:
            turn()
            memory.append((total, _memory(url, pid)))
    return {
        "clients": given.clients,
        "engine": given.engine,
        "answers": total,
        "warm": memory[0][0],
        "different_answers": len(set(texts)),
        "wrong": wrong,
        "anothers": strangers,
        "errors": all_seen.errors,
        "refused": len(all_seen.refused_s),
        "first_token_ms": load.percentiles(all_seen.first_s),
        "memory_mib": {
            what: {
                "first": round(memory[0][1][what], 1),
                "last": round(memory[-1][1][what], 1),
                "per_1000_answers": round(_slope([(count, found[what]) for count, found in memory]), 3),
            }
            for what in memory[0][1]
        },
    }


def _memory(url: str, pid: int) -> dict[str, float]:
    """MiB: what the server and all its processes have resident, and what each part says that it holds."""
    with urllib.request.urlopen(url.removesuffix("/v1") + "/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    found = {}
    for line in lines:
        if line.startswith("beheld_held_bytes{"):
            found["held_" + line.split('"')[1]] = float(line.rsplit(" ", 1)[1]) / 2**20
    return {"resident": resident_mib(pid), **found} if pid else found


def _scenes(count: int, tokens: int) -> list[bytes]:
    from training.mote.evaluate import sample_case

    made = []
    for number in range(count):
        case = sample_case("description", number)
        parts: list[dict[str, Any]] = []
        for picture in case.pictures:
            file = io.BytesIO()
            picture.save(file, format="PNG")
            url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
            parts.append({"type": "image_url", "image_url": {"url": url}})
        parts.append({"type": "text", "text": case.exchange.question})
        made.append(load.body([{"role": "user", "content": parts}], tokens))
    return made


def resident_mib(pid: int) -> float:
    """Memory of a process and its children."""
    pids, total = [pid], 0.0
    for one in pids:
        try:
            with open(f"/proc/{one}/statm") as file:
                total += int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20
            with open(f"/proc/{one}/task/{one}/children") as file:
                pids += [int(word) for word in file.read().split()]
        except OSError:
            continue
    return total


def _slope(points: list[tuple[int, float]]) -> float:
    """MiB for each thousand answers, by least squares."""
    if len(points) < 2:
        return 0.0
    return 1000 * statistics.linear_regression([p[0] for p in points], [p[1] for p in points]).slope


# ---------------------------------------------------------------------- overload and start


def overload(given: argparse.Namespace) -> dict[str, Any]:
    """The peak of a closed loop, then an open loop of so many times that rate: what is still answered, and how fast
    the others are refused."""
    with served(given, "--max-concurrent-requests", str(given.limit)) as (url, _):
        asyncio.run(load.closed_loop(url, KEY, requests(given, given.clients, 1), given.clients))
        peak = load.report(
            *asyncio.run(load.closed_loop(url, KEY, requests(given, given.requests, 2), given.clients)), given.clients
        )
        pool = requests(given, 256, 3)
        rate = given.times * peak["requests_per_s"]
        seen, seconds = asyncio.run(load.open_loop(url, KEY, pool, load.even_times(rate, given.seconds)))
        begin = time.perf_counter()
        after, _ = asyncio.run(load.closed_loop(url, KEY, requests(given, 8, 4), 1))
        recovered = time.perf_counter() - begin
    goodput = len(seen.total_s) / seconds
    return {
        "engine": given.engine,
        "peak_requests_per_s": peak["requests_per_s"],
        "offered_per_s": round(rate, 1),
        "answered_per_s": round(goodput, 2),
        "goodput": round(goodput / peak["requests_per_s"], 3),
        "refused": len(seen.refused_s),
        "refused_ms": load.percentiles(seen.refused_s),
        "errors": seen.errors,
        "after": {"answered": len(after.total_s), "seconds": round(recovered, 2)},
    }


def start(given: argparse.Namespace) -> dict[str, Any]:
    """Seconds from starting `beheld serve` to the end of the first answer, asked for as soon as it listens."""
    found = []
    # The first one leaves the system's caches warm, and compiled modules where they were not.
    for _ in range(1 + given.rounds):
        begin = time.perf_counter()
        process, port = begun(given)
        try:
            url = f"http://127.0.0.1:{port}/v1"
            seen, _ = asyncio.run(load.closed_loop(url, KEY, requests(given, 1, 5), 1))
            assert seen.total_s, seen.errors
            found.append(time.perf_counter() - begin)
        finally:
            process.kill()
            process.wait()
    median, worst = statistics.median(found[1:]), max(found[1:])
    return {"engine": given.engine, "median_s": round(median, 2), "worst_s": round(worst, 2)}


def ladder(given: argparse.Namespace) -> dict[str, Any]:
    """One report for each number of clients, each of which waits for its answer before it asks again."""
    lines = []
    with served(given) as (url, pid):
        for step, clients in enumerate(int(word) for word in given.ladder.split(",")):
            spread(given, url, clients, 900 + step, clients=clients)
            before = spent_s(pid) if pid else {}
            *run, busy = spread(given, url, given.requests, step, clients=clients)
            lines.append(load.report(*run, clients) | _shares(pid, before, run[1], busy))
    return {"engine": given.engine, "serve": given.serve, "ladder": lines}


def _shares(pid: int, before: dict[str, float], seconds: float, busy: float) -> dict[str, Any]:
    """The shares of a core that the server's processes took, and the busiest one of those that send requests."""
    found = (
        {name: round((spent - before.get(name, 0.0)) / seconds, 2) for name, spent in spent_s(pid).items()}
        if pid
        else {}
    )
    return {"cores": found, "load_cores": round(busy, 2)}


def offered(given: argparse.Namespace) -> dict[str, Any]:
    """One report for each rate of requests, which come at random times (Poisson) whether or not others have ended.

    A rate is sustained if the last answer ends soon after the last request came: `behind_s`.
    """
    lines = []
    with served(given) as (url, pid):
        for step, rate in enumerate(float(word) for word in given.rates.split(",")):
            spread(given, url, given.clients, 900 + step, clients=given.clients)
            times = list(load.poisson_times(rate, given.seconds, random.Random(step)))
            before = spent_s(pid) if pid else {}
            seen, seconds, busy = spread(given, url, len(times), step, times=times)
            line = load.report(seen, seconds, given.clients) | {"behind_s": round(seconds - times[-1], 2)}
            line |= _shares(pid, before, seconds, busy)
            lines.append({"offered_per_s": rate, **{name: value for name, value in line.items() if name != "clients"}})
    return {"engine": given.engine, "serve": given.serve, "offered": lines}


WAYS = {
    "overhead": overhead,
    "first": first,
    "own": own,
    "overload": overload,
    "start": start,
    "ladder": ladder,
    "offered": offered,
    "streams": streams,
    "within": within,
}


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description="Measure the server.")
    parser.add_argument("way", choices=[*WAYS, "asked", "hostile", "soak"])
    parser.add_argument("--model", help="a folder; without it, the embedded model")
    parser.add_argument("--url", help="measure this server instead of starting one")
    parser.add_argument("--engine", choices=("process", "thread"), default="thread")
    parser.add_argument("--clients", default="32", help="of ladder several, as 1,4,16")
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--load-processes", type=int, default=1, help="of ladder and offered: processes that send the requests"
    )
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--side", type=int, default=224, help="of the pictures, in pixels; 0 sends none")
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--scenes", type=int, default=256)
    parser.add_argument("--warm", type=int, default=6144, help="answers before memory is looked at, for own and soak")
    parser.add_argument("--count", type=int, default=100_000, help="requests of soak")
    parser.add_argument("--rate", type=float, default=0.0, help="of soak: requests a second at most; 0 is no limit")
    parser.add_argument("--times", type=float, default=10.0)
    parser.add_argument(
        "--rates", default="40,80", help="of offered: requests a second, several with commas between them"
    )
    parser.add_argument("--token-rate", type=float, default=30.0, help="of streams: tokens a second of each")
    parser.add_argument("--fronts", type=int, default=1, help="of streams: processes that speak HTTP")
    parser.add_argument("--fields", default="{}", help="of streams: more fields of each request, as JSON")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--limit", type=int, default=64, help="answers in work at once, for overload")
    parser.add_argument("--attack", help="of hostile: some of its attacks, with commas between them")
    parser.add_argument("--nice", type=int, default=19, help="of hostile: the priority of the attackers' threads")
    parser.add_argument("--together", action="store_true", help="of hostile: all attacks at once, on one server")
    parser.add_argument("--prefix", default="", help="words before the server's command, such as those of a container")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--serve", default="", help='more flags for the server, as "--load-format dummy"')
    given = parser.parse_args()
    given.ladder = given.clients
    given.clients = int(given.clients.split(",")[-1])
    if given.way == "asked":
        asked(given)
    elif given.way == "hostile":
        for line in hostile(given, begun):
            print(json.dumps(line), flush=True)
    elif given.way == "soak":
        for line in soak(given, begun, _memory, _slope):
            print(json.dumps(line), flush=True)
    else:
        print(json.dumps(WAYS[given.way](given)))


if __name__ == "__main__":
    main()
