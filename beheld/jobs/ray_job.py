"""A job that Ray Data shares out among engines of a cluster; this process alone writes the output.

An engine that dies is replaced, and its items are answered again by another one. Lines are written here, one for each
item, so an answer that comes twice is written once.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from beheld.cluster.remote import Secrets, environment
from beheld.cluster.session import connected
from beheld.core.errors import EngineDeadError, first_line
from beheld.jobs.items import BadLine, Item
from beheld.jobs.job import Ledger, Progress, post_until_taken, server_of_job
from beheld.jobs.output import OutputFile
from beheld.server.options import ServerOptions

# The most items that an engine gets at a time, and the most bytes of their bodies; a larger item goes alone.
_ITEMS, _BYTES = 64, 16 << 20
ASKING = "beheld batch --ray"


class Answerer:
    """An engine in an actor of Ray Data's.

    Args:
        model, options: as AsyncLLM.
        server: the server's options.
        concurrency: the most requests under way; None for twice the sequences of a step.
        secrets: variables of the process that runs the job.
    """

    def __init__(
        self,
        model: str | None,
        options: dict[str, Any],
        server: ServerOptions,
        concurrency: int | None,
        secrets: Secrets,
    ) -> None:
        secrets.set()
        from beheld.api.async_llm import AsyncLLM
        from beheld.server.app import Service

        self._llm = AsyncLLM(model, **options)
        server = server_of_job(server)
        self._app = Service(self._llm, server).app()
        self._most = concurrency or 2 * self._llm.config.max_num_seqs
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="beheld-answers", daemon=True).start()
        for lora in server.loras:
            asyncio.run_coroutine_threadsafe(self._llm.add_lora(lora), self._loop).result()

    def __call__(self, table: Any) -> Any:
        """Answer the items of a table, see `blocks`; the result has a row for each."""
        arrow = importlib.import_module("pyarrow")
        rows = table.to_pylist()
        found = asyncio.run_coroutine_threadsafe(self._all(rows), self._loop).result()
        return arrow.Table.from_pylist(
            [
                {"custom_id": row["custom_id"], "status": status, "number": number, "body": json.dumps(body).encode()}
                for row, (status, number, body) in zip(rows, found, strict=True)
            ]
        )

    async def _all(self, rows: list[dict[str, Any]]) -> list[tuple[int, str, dict[str, Any]]]:
        room = asyncio.Semaphore(self._most)

        async def answer(row: dict[str, Any]) -> tuple[int, str, dict[str, Any]]:
            async with room:
                return await post_until_taken(self._app, self._llm, row["url"], row["body"])

        return list(await asyncio.gather(*map(answer, rows)))


def blocks(items: Iterator[Item | BadLine], ledger: Ledger) -> Iterator[list[dict[str, Any]]]:
    """Yield the items that are to do, in lists of bounded sizes."""
    rows: list[dict[str, Any]] = []
    size = 0
    for given in items:
        item = ledger.take(given)
        if item is None:
            continue
        if rows and (len(rows) == _ITEMS or size + len(item.body) > _BYTES):
            yield rows
            rows, size = [], 0
        rows.append({"custom_id": item.custom_id, "url": item.url, "body": item.body})
        size += len(item.body)
    if rows:
        yield rows


def run_ray_job(
    model: str | None,
    options: dict[str, Any],
    server: ServerOptions,
    items: Iterator[Item | BadLine],
    output: OutputFile,
    *,
    gpus_each: int,
    concurrency: int | None,
    progress: Progress,
    tell: Callable[[Progress], None],
) -> None:
    """Answer all items that the output does not hold.

    All items are read first, into Ray's object store, which keeps on disk what does not fit its memory.

    Args:
        options: of the engines; `data_parallel_size` says how many there are.
        gpus_each: GPUs of each; 0 for a core of a CPU.
        output, progress, tell: see Ledger.

    Raises:
        ConfigError: Ray is not installed; the input cannot be read or the output cannot be written.
        EngineDeadError: engines died again and again; the items that none answered are not in the output.
    """
    ray = connected(ASKING)
    data, arrow = importlib.import_module("ray.data"), importlib.import_module("pyarrow")
    data.DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    # It warns that it shows no progress; this job's own is shown.
    logging.getLogger("ray.data._internal.progress").setLevel(logging.ERROR)
    options = dict(options)
    engines = options.pop("data_parallel_size", 1)
    options.pop("data_parallel_backend", None)
    ledger = Ledger(output, progress, tell)
    refs = [ray.put(arrow.Table.from_pylist(rows)) for rows in blocks(items, ledger)]
    if not refs:
        ledger.end()
        return
    answers = data.from_arrow_refs(refs).map_batches(
        Answerer,
        fn_constructor_args=(model, options, server, concurrency, Secrets.of(os.environ)),
        batch_size=None,
        batch_format="pyarrow",
        compute=data.ActorPoolStrategy(size=min(engines, len(refs)), max_tasks_in_flight_per_actor=2),
        num_cpus=0 if gpus_each else 1,
        num_gpus=gpus_each,
        runtime_env={"env_vars": environment(os.environ, sys.path)},
    )
    del refs
    try:
        for row in answers.iter_rows():
            ledger.answer(row["custom_id"], row["status"], row["number"], json.loads(row["body"]))
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None) or error
        raise EngineDeadError(
            f"The job has ended in the Ray cluster ({type(cause).__name__}: {first_line(cause)}).",
            "Run the same command with --resume.",
        ) from error
    ledger.end()
