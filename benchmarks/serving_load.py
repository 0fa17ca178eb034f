"""Load from several processes, so that what sends requests does not bound the server: one interpreter each.

    python -m benchmarks.serving_load '{"url": ..., ...}'      one of them; `spread` starts them

Each makes its bodies, says that it is ready, and begins when all are. The figures are those of all together.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from beheld.cli import load

KEY = "EMPTY"


def spread(
    given: argparse.Namespace, url: str, count: int, seed: int, *, clients: int = 0, times: list[float] | None = None
) -> tuple[load.LoadResult, float, float]:
    """Send requests with new images: at these times, or from so many clients in a closed loop.

    Returns the results, the seconds from the first request to the end of the last answer, and the busiest process's
    share of a core.
    """
    number = min(given.load_processes, clients or count)
    made = []
    for place in range(number):
        part: dict[str, Any] = {"url": url, "tokens": given.tokens, "side": given.side, "seed": seed * 1000 + place}
        own = None if times is None else times[place::number]
        part |= {"times": own, "clients": clients // number + (place < clients % number)}
        part["count"] = len(own) if own is not None else count // number + (place < count % number)
        command = [sys.executable, "-m", "benchmarks.serving_load", "-"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdin is not None
        process.stdin.write(json.dumps(part) + "\n")
        process.stdin.flush()
        made.append(process)
    result, begin, end, busy = load.LoadResult(), float("inf"), 0.0, 0.0
    for process in made:
        assert process.stdout is not None
        if process.stdout.readline().strip() != "ready":
            raise SystemExit("a process that sends requests has ended")
    for process in made:
        assert process.stdin is not None
        process.stdin.write("begin\n")
        process.stdin.flush()
    for process in made:
        found = json.loads(process.communicate()[0])
        begin, end, busy = min(begin, found["begin"]), max(end, found["end"]), max(busy, found["busy"])
        _add(result, found["result"])
    return result, end - begin, busy


def _add(result: load.LoadResult, found: dict[str, Any]) -> None:
    result.tokens += found["tokens"]
    result.said = result.said or found["said"]
    for name in ("first_s", "between_s", "total_s", "refused_s"):
        getattr(result, name).extend(found[name])
    for what, count in found["errors"].items():
        result.errors[what] = result.errors.get(what, 0) + count


def main() -> None:
    """Be one of the processes."""
    part = json.loads(sys.stdin.readline())
    bodies = list(load.bodies(part["count"], part["tokens"], part["side"] or None, None, part["seed"]))
    print("ready", flush=True)
    sys.stdin.readline()
    # The same clock in all processes.
    begin, spent = time.monotonic(), time.process_time()
    if part["times"] is None:
        work = load.closed_loop(part["url"], KEY, bodies, part["clients"])
    else:
        work = load.open_loop(part["url"], KEY, bodies, part["times"])
    result, _ = asyncio.run(work)
    end, spent = time.monotonic(), time.process_time() - spent
    found = {**asdict(result), "texts": {}}
    print(json.dumps({"begin": begin, "end": end, "busy": spent / max(end - begin, 1e-9), "result": found}))


# ---------------------------------------------------------------------- what the server's processes spend

# Modules of programs, and the name of an engine that is a copy of the server.
_PARTS = {"beheld.engine.process": "engine", "beheld-engine": "engine", "beheld.cli.front": "front"}


def spent_s(pid: int) -> dict[str, float]:
    """Seconds of processor time so far of a server's processes: "front 0", further fronts, engines, and all others."""
    found = {"front 0": _own_s(pid), "others": 0.0}
    counts: dict[str, int] = {"front": 1, "engine": 0}
    pids = _children(pid)
    for own in pids:
        try:
            words = Path(f"/proc/{own}/cmdline").read_bytes().decode().split("\0")
            words.append(Path(f"/proc/{own}/comm").read_text().strip())
            part = next((_PARTS[word] for word in words if word in _PARTS), None)
            seconds = _own_s(own)
        except OSError:
            continue
        pids += _children(own)
        if part is None:
            found["others"] += seconds
        else:
            found[f"{part} {counts[part]}"] = seconds
            counts[part] += 1
    return found


def _own_s(pid: int) -> float:
    words = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def _children(pid: int) -> list[int]:
    try:
        files = Path(f"/proc/{pid}/task").glob("*/children")
        return [int(word) for file in files for word in file.read_text(encoding="ascii").split()]
    except OSError:
        return []


if __name__ == "__main__":
    main()
