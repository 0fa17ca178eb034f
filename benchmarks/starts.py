"""Starts of several checkouts in turn: processor time and the clock up to a server that answers, and of whole commands.

    python -m benchmarks.starts [--trees . ../other] [--rounds 7] [--what serve serve_process ask help llm]

`serve` and `serve_process` are `beheld serve` on mote with the engine in a thread and in a process: up to the first 200
of `/health` (`ready`), up to the end of a first chat (`first`) and of a second one (`second`), by a clock of their own.
`ask` is `beheld ask` with an image, `help` is `beheld --help`, `llm` is an offline `LLM` of a tiny Qwen2-VL checkpoint.
Processor time is that of all of a command's processes. Prints a JSON line for each start, then the medians of each
checkout and the median of its ratios to the last checkout, start by start. A first round, which fills caches, does not
count.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

SCENE = Path(__file__).parent.parent / "examples" / "scene.png"
KINDS = ("serve", "serve_process", "ask", "help", "llm")
CHAT = {"model": "mote", "messages": [{"role": "user", "content": "Say yes."}], "max_tokens": 2, "temperature": 0}
LLM = """
import os, sys
from beheld import LLM
LLM(sys.argv[1], dtype="float32", max_model_len=128, use_tqdm_on_load=False)
os._exit(0)
"""
_TICKS = os.sysconf("SC_CLK_TCK")
_LIMIT_S = 120.0


def processor_s(pid: int) -> float:
    """Processor time of a process and of those that it has started."""
    total, waiting = 0.0, [pid]
    while waiting:
        one = Path("/proc") / str(waiting.pop())
        try:
            fields = (one / "stat").read_text().rpartition(")")[2].split()
            total += sum(map(int, fields[11:15])) / _TICKS
            for task in (one / "task").iterdir():
                waiting += map(int, (task / "children").read_text().split())
        except FileNotFoundError:
            continue
    return total


def ask(port: int, path: str, body: dict[str, object] | None = None) -> bool:
    """Whether a server answers a request with 200."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=_LIMIT_S) as answer:
            return bool(answer.read() is not None and answer.status == 200)
    except urllib.error.HTTPError as error:
        if error.code != 503:
            raise
        return False
    except OSError:
        return False


def serve(tree: Path, engine: str) -> dict[str, float]:
    """One start of a server: seconds to the first 200 of `/health` and to the ends of two chats."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["serve", "--engine", engine, "--host", "127.0.0.1", "--port", str(port)]
    begun = time.perf_counter()
    server = subprocess.Popen(
        [sys.executable, "-m", "beheld.cli.main", *words],
        env=os.environ | {"PYTHONPATH": str(tree)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        while not ask(port, "/health"):
            if server.poll() is not None or time.perf_counter() - begun > _LIMIT_S:
                raise SystemExit(f"{tree} does not start.")
            time.sleep(0.02)
        found = {"ready_wall": time.perf_counter() - begun, "ready_cpu": processor_s(server.pid)}
        for name in ("first", "second"):
            asked = time.perf_counter()
            if not ask(port, "/v1/chat/completions", CHAT):
                raise SystemExit(f"{tree} does not answer.")
            found |= {f"{name}_wall": time.perf_counter() - asked, f"{name}_cpu": processor_s(server.pid)}
        return found
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def whole(tree: Path, words: list[str]) -> dict[str, float]:
    """A command up to its end."""
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(
        [sys.executable, *words], env=os.environ | {"PYTHONPATH": str(tree)}, check=True, capture_output=True
    )
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "wall": time.perf_counter() - begun,
        "cpu": spent.ru_utime + spent.ru_stime - before.ru_utime - before.ru_stime,
    }


def start(what: str, tree: Path, checkpoint: str) -> dict[str, float]:
    """One start, or one whole command."""
    if what in ("serve", "serve_process"):
        return serve(tree, "process" if what == "serve_process" else "thread")
    command = {
        "ask": ["-m", "beheld.cli.main", "ask", str(SCENE), "What is in this picture?", "--max-tokens", "8"],
        "help": ["-m", "beheld.cli.main", "--help"],
        "llm": ["-c", LLM, checkpoint],
    }
    return whole(tree, command[what])


def main() -> None:
    """Start each checkout in turn, several times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trees", type=Path, nargs="+", default=[Path.cwd()])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--what", nargs="+", default=["serve"], choices=["serve", "serve_process", "ask", "help", "llm"]
    )
    parser.add_argument("--checkpoint", help="the folder of `llm`; a tiny Qwen2-VL is written otherwise")
    arguments = parser.parse_args()
    trees = [tree.resolve() for tree in arguments.trees]
    checkpoint = arguments.checkpoint
    if "llm" in arguments.what and not checkpoint:
        from tests import tiny

        checkpoint = str(tiny.checkpoint("qwen2_vl"))
    os.chdir(tempfile.gettempdir())
    for what in arguments.what:
        found: dict[Path, list[dict[str, float]]] = {tree: [] for tree in trees}
        for number in range(arguments.rounds + 1):
            for tree in trees:
                seconds = start(what, tree, checkpoint or "")
                if number:
                    found[tree].append(seconds)
                    print(json.dumps({"what": what, "tree": tree.name} | {k: round(v, 3) for k, v in seconds.items()}))
        for tree in trees:
            line: dict[str, object] = {"what": what, "tree": tree.name, "median": True}
            for name in found[tree][0]:
                line[name] = round(statistics.median(one[name] for one in found[tree]), 3)
                pairs = zip(found[tree], found[trees[-1]], strict=True)
                line[f"{name}_ratio"] = round(statistics.median(a[name] / b[name] for a, b in pairs), 3)
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
