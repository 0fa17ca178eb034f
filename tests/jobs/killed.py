"""A job with an engine that only waits, for tests that kill it: python -m tests.jobs.killed INPUT OUTPUT."""

from __future__ import annotations

import asyncio
import random
import sys
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


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    job.Service = Service  # type: ignore[assignment,misc]
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


if __name__ == "__main__":
    main()
