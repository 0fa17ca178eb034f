"""The server against vLLM's on one CPU: one checkpoint, one client that asks both the same, in turn; one JSON line.

    python -m benchmarks.serving_peer --peer PYTHON --size small --rounds 2
    python -m benchmarks.serving_peer --peer PYTHON --size tiny --rounds 2

PYTHON is the interpreter of an environment with vLLM's CPU build; without it ours is measured alone. Each round starts
one server, measures, stops it, and does the same with the other, in changing order. Measured by means of OpenAI's API
alone:

- from the start of the process to the end of the first answer, asked for again and again until it comes;
- one client's first token with a picture of 224 x 224 pixels that nobody has seen before;
- output tokens/s under several numbers of clients, each request with such a picture and the same number of new tokens;
- what went wrong, and the memory of the server's processes, each page counted once.

Both have float32 weights, the limits that `LIMITS` and `--max-num-seqs` say, one picture and no video to a prompt,
2 GiB of KV cache, all cores for the model and no lines in their logs. What only one of them knows stands in `ours` and
`theirs`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from beheld.cli import load
from benchmarks.checkpoints import qwen2_5_vl_served

KEY = "EMPTY"
LIMITS = {
    "--dtype": "float32",
    "--max-model-len": "1024",
    "--max-num-batched-tokens": "2048",
    "--limit-mm-per-prompt": '{"image": 1, "video": 0}',
    "--seed": "0",
}
MAX_START_S = 600.0


@dataclass(frozen=True)
class Side:
    """A server to be measured.

    Attributes:
        command: what starts it, but for the limits and the address.
        environment: variables in addition to this process's own.
        removed: variables of this process that it does not get.
    """

    command: list[str]
    environment: dict[str, str]
    removed: tuple[str, ...] = ()


@dataclass
class Found:
    """What all rounds of one side gave.

    Attributes:
        start_s: from the process's start to the end of the first answer.
        first_s: to the first token of one client, request by request.
        tokens_per_s: of each round, by the number of clients.
        memory_mib: after the first answer, and after all.
        errors: what went wrong, and how often.
    """

    start_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    tokens_per_s: dict[int, list[float]] = field(default_factory=dict)
    memory_mib: dict[str, list[float]] = field(default_factory=lambda: {"started": [], "served": []})
    errors: dict[str, int] = field(default_factory=dict)

    def count(self, seen: load.LoadResult) -> None:
        """Add the errors of one run; an answer that is refused for lack of room is one, too."""
        for what, number in (*seen.errors.items(), ("refused", len(seen.refused_s))):
            if number:
                self.errors[what] = self.errors.get(what, 0) + number


def ours(model: Path, flags: str) -> Side:
    """`beheld serve` out of this environment."""
    # Installed packages bring compiled modules along; a checkout whose modules may not be kept compiles at every start.
    command = [sys.executable, "-m", "beheld.cli.main", "serve", str(model), *shlex.split(flags)]
    quiet = {"BEHELD_LOG_LEVEL": "ERROR", "BEHELD_CPU_KV_CACHE_GIB": "2"}
    return Side(command, quiet, ("PYTHONDONTWRITEBYTECODE",))


def theirs(python: str, model: Path, flags: str) -> Side:
    """vLLM's server, set up as its manual for CPUs advises where that is known to help."""
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0)))
    quiet = {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        # By itself it leaves a core to the HTTP server, which on two cores halves the model's.
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "HF_HUB_OFFLINE": "1",
    }
    # Its threads are those of the OpenMP library that its manual wants loaded first.
    library = Path(python).parent.parent / "lib" / "libiomp5.so"
    if library.is_file():
        quiet["LD_PRELOAD"] = str(library)
    options = ["--enforce-eager", "--uvicorn-log-level", "error", *shlex.split(flags)]
    return Side([*command, *options], quiet, ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE"))


# ---------------------------------------------------------------------- one server


@contextlib.contextmanager
def running(side: Side, max_num_seqs: int, log: Path) -> Iterator[tuple[str, int, float]]:
    """A server that has answered once: (its address, its process, seconds from its start to the end of that answer).

    Raises:
        SystemExit: it ended before, or gave no answer in `MAX_START_S`; with the end of its log.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if name not in side.removed} | side.environment
    limits = [word for pair in LIMITS.items() for word in pair]
    command = [*side.command, *limits, "--max-num-seqs", str(max_num_seqs), "--host", "127.0.0.1", "--port", str(port)]
    url = f"http://127.0.0.1:{port}/v1"
    with log.open("wb") as output:
        begin = time.perf_counter()
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
        try:
            while not asyncio.run(load.closed_loop(url, KEY, [load.body(TALK, 4, ignore_eos=True)], 1))[0].total_s:
                if process.poll() is not None or time.perf_counter() - begin > MAX_START_S:
                    raise SystemExit(f"{command} gave no answer:\n{log.read_text(errors='replace')[-3000:]}")
                time.sleep(0.02)
            yield url, process.pid, time.perf_counter() - begin
        finally:
            _end(process)


TALK = [{"role": "user", "content": "Hello."}]


def _end(process: subprocess.Popen[bytes]) -> None:
    """Stop a server and whatever it has started."""
    started = family(process.pid)
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(30)
    for pid in started:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
    # What is killed takes a moment to end, and the next server should find the cores free.
    deadline = time.monotonic() + 10
    while any(map(alive, started)) and time.monotonic() < deadline:
        time.sleep(0.01)


def alive(pid: int) -> bool:
    """False also of a process that has ended, and whose parent has not looked yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def family(pid: int) -> list[int]:
    """A process and all that descend from it, whichever of its threads started them."""
    found = [pid]
    for one in found:
        for children in Path(f"/proc/{one}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found += [int(word) for word in children.read_text().split()]
    return found


def resident_mib(pid: int) -> float:
    """Memory that a process and its descendants have resident; pages that several share count once."""
    total = 0.0
    for one in family(pid):
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{one}/smaps_rollup").read_text().splitlines()
            total += sum(int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss:"))
    return total


# ---------------------------------------------------------------------- what is asked


def measure(given: argparse.Namespace, side: Side, found: Found, number: int, log: Path) -> None:
    """One round of one side: both sides of a round are asked for the same."""

    def requests(count: int, part: int) -> list[bytes]:
        return list(load.bodies(count, given.tokens, 224, None, 1000 * number + part))

    def run(bodies: list[bytes], clients: int) -> tuple[load.LoadResult, float]:
        seen, seconds = asyncio.run(load.closed_loop(url, KEY, bodies, clients))
        found.count(seen)
        return seen, seconds

    with running(side, given.max_num_seqs, log) as (url, pid, start_s):
        found.start_s.append(start_s)
        found.memory_mib["started"].append(resident_mib(pid))
        run(requests(max(given.clients), 0), max(given.clients))
        # Answers of four tokens: the first one is what is looked at.
        alone = list(load.bodies(given.first, 4, 224, None, 1000 * number + 1))
        found.first_s += run(alone, 1)[0].first_s
        for part, clients in enumerate(given.clients, 2):
            count = given.requests if clients > 1 else given.requests // 8
            seen, seconds = run(requests(max(clients, count), part), clients)
            found.tokens_per_s.setdefault(clients, []).append(seen.tokens / seconds)
        found.memory_mib["served"].append(resident_mib(pid))


def figures(found: Found) -> dict[str, Any]:
    """The figures of one side."""
    first = sorted(1e3 * value for value in found.first_s) or [0.0]
    return {
        "start_to_first_answer_s": round(statistics.median(found.start_s), 2),
        "first_token_ms": {"p25": round(first[len(first) // 4], 1), "median": round(statistics.median(first), 1)},
        "tokens_per_s": {str(n): round(statistics.median(rates), 1) for n, rates in found.tokens_per_s.items()},
        "tokens_per_s_of_rounds": {
            str(n): [round(rate, 1) for rate in rates] for n, rates in found.tokens_per_s.items()
        },
        "memory_mib": {when: round(statistics.median(values)) for when, values in found.memory_mib.items()},
        "errors": found.errors,
    }


def compare(given: argparse.Namespace) -> dict[str, Any]:
    """All rounds of both sides, and how many times better ours is than the peer's (above 1: better)."""
    model = given.model or qwen2_5_vl_served(given.folder, given.size)
    sides = {"beheld": ours(model, given.serve)}
    if given.peer:
        sides["peer"] = theirs(given.peer, model, given.peer_serve)
    found = {name: Found() for name in sides}
    for number in range(given.rounds):
        for name in list(sides)[:: 1 if number % 2 == 0 else -1]:
            measure(given, sides[name], found[name], number, given.folder / f"serving_{name}.log")
            print(f"round {number + 1}, {name}: {json.dumps(figures(found[name]))}", file=sys.stderr, flush=True)
    line: dict[str, Any] = {
        "model": model.name,
        "cores": len(os.sched_getaffinity(0)),
        "rounds": given.rounds,
        "tokens": given.tokens,
        "max_num_seqs": given.max_num_seqs,
        **{name: figures(one) for name, one in found.items()},
    }
    if given.peer:
        mine, other = line["beheld"], line["peer"]
        line["times_better"] = {
            "start": _ratio(other["start_to_first_answer_s"], mine["start_to_first_answer_s"]),
            "first_token": _ratio(other["first_token_ms"]["median"], mine["first_token_ms"]["median"]),
            "tokens_per_s": {n: _ratio(rate, other["tokens_per_s"][n]) for n, rate in mine["tokens_per_s"].items()},
            "memory": _ratio(other["memory_mib"]["served"], mine["memory_mib"]["served"]),
        }
    return line


def _ratio(above: float, below: float) -> float | None:
    """None where a side has no figure because all its answers failed."""
    return round(above / below, 2) if above and below else None


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", metavar="PYTHON", help="interpreter of an environment with vLLM's CPU build")
    parser.add_argument("--size", choices=("small", "tiny"), default="small", help="0.43 B parameters, or 5 million")
    parser.add_argument("--model", type=Path, help="another folder; every token of its should be a piece of text")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--clients", default="1,8,32", help="numbers of clients (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=32, help="of each number of clients; an eighth of them of 1")
    parser.add_argument("--first", type=int, default=24, help="requests whose first token is timed")
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--serve", default="", help='more flags for our server, as "--engine process"')
    parser.add_argument("--peer-serve", default="", help="more flags for the peer's")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "beheld-benchmarks")
    given = parser.parse_args()
    given.clients = [int(word) for word in given.clients.split(",")]
    print(json.dumps(compare(given)))


if __name__ == "__main__":
    main()
