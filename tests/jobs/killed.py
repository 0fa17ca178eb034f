"""A job with an engine that only waits, for tests that kill it: python -m tests.jobs.killed INPUT OUTPUT KILLS."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from beheld.jobs import job
from beheld.jobs.items import read_items
from beheld.jobs.output import OutputFile
from beheld.server.options import ServerOptions


async def answer(request: Request) -> Response:
    body = await request.json()
    await asyncio.sleep(random.random() * 0.02)
    return JSONResponse({"said": body["n"], "filler": "x" * 20_000})


class Service:
    """Stands for the server's: one route."""

    def __init__(self, llm: Any, options: Any) -> None:
        pass

    def app(self) -> Starlette:
        return Starlette(routes=[Route("/v1/chat/completions", answer, methods=["POST"])])


class Alive:
    alive = True
    reason = ""


def run(source: Path, target: Path) -> None:
    """The whole job, resumed."""
    output = OutputFile(target, resume=True)
    work = job.run_job(
        Alive(),  # type: ignore[arg-type]
        ServerOptions(),
        read_items(source),
        output,
        concurrency=16,
        progress=job.Progress(),
        tell=lambda progress: None,
    )
    asyncio.run(work)
    output.close()


def forked(source: Path, target: Path) -> int:
    """The process id of a job in a fork, which need not import."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        run(source, target)
        status = 0
    finally:
        os._exit(status)


def main() -> None:
    """Start the job again and again, kill each after a random time, let the last end; print how many were killed."""
    source, target, kills = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    vars(job)["Service"] = Service
    chosen, killed = random.Random(0), 0
    for _ in range(kills):
        child, before = forked(source, target), target.stat().st_size if target.exists() else 0
        # From the first line that this run writes, so that kills fall among writes.
        while not target.exists() or target.stat().st_size <= before:
            if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                break
            time.sleep(0.001)
        time.sleep(chosen.random() * 0.1)
        os.kill(child, signal.SIGKILL)
        killed += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    status = os.waitstatus_to_exitcode(os.waitpid(forked(source, target), 0)[1])
    assert status == 0
    print(killed)


if __name__ == "__main__":
    main()
