"""Runs a job: many requests at once through the server's own application, without HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.types import ASGIApp, Message

from beheld.api.async_llm import AsyncLLM
from beheld.core.errors import EngineDeadError
from beheld.jobs.items import MALFORMED, BadLine, Item
from beheld.jobs.metrics_port import MetricsPort
from beheld.jobs.output import OutputFile, key_of
from beheld.server.app import Service
from beheld.server.options import ServerOptions

# Bytes of the bodies of all requests that are under way; one larger body runs alone.
_MAX_BYTES = 256 << 20
# No limit.
_NONE = 1 << 60
# Seconds between two tries of a request that the engine had no room for.
_RETRY_S = 0.5
_BUSY = (429, 503)


@dataclass
class Progress:
    """What a job has done so far.

    Attributes:
        answered: items with an answer.
        failed: items with an error, and lines that are no requests.
        malformed: lines that have not the form of a request.
        skipped: items that an earlier run did.
        unknown: items of the output that the input does not have.
        prompt_tokens, output_tokens: of the answers.
        position: bytes of the input that were read.
        begun: when the job began, by time.monotonic.
    """

    answered: int = 0
    failed: int = 0
    malformed: int = 0
    skipped: int = 0
    unknown: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    position: int = 0
    begun: float = field(default_factory=time.monotonic)


class Ledger:
    """Tells which items of a job are still to do, and writes what became of each, once.

    Args:
        output: gets one line per item.
        progress: is kept up to date.
        tell: called after every line.
    """

    def __init__(self, output: OutputFile, progress: Progress, tell: Callable[[Progress], None]) -> None:
        self._output, self._progress, self._tell = output, progress, tell
        self._done, self._seen, self._open = output.done, set[bytes](), set[bytes]()

    def take(self, item: Item | BadLine) -> Item | None:
        """Return an item that is to be answered; None if it has its line, or gets one now because it is no request."""
        self._progress.position = item.position
        # Of lines with one custom_id the first has it; the others are known by their numbers.
        custom_id = item.custom_id
        if custom_id is not None and key_of(custom_id) in self._seen:
            message = "An earlier line has this custom_id. Give each line its own."
            item = BadLine(item.line, "duplicate_custom_id", message, item.position, custom_id)
            custom_id = None
        key = key_of(custom_id, item.line)
        self._seen.add(key)
        if key in self._done:
            self._done.discard(key)
            self._progress.skipped += 1
            return None
        if isinstance(item, Item):
            self._open.add(key)
            return item
        error = {"code": item.code, "message": item.message, "line": item.line, "custom_id": item.custom_id}
        self._progress.malformed += item.code in MALFORMED
        self._write({"custom_id": custom_id, "response": None, "error": error}, failed=True)
        return None

    def answer(self, custom_id: str, status: int, number: str, body: dict[str, Any]) -> None:
        """Write the answer to an item that `take` returned; a second one is dropped."""
        key = key_of(custom_id)
        if key not in self._open:
            return
        self._open.discard(key)
        failure = None if status == 200 else _failure(body)
        usage = body.get("usage") or {} if failure is None else {}
        self._progress.prompt_tokens += usage.get("prompt_tokens") or usage.get("input_tokens") or 0
        self._progress.output_tokens += usage.get("completion_tokens") or usage.get("output_tokens") or 0
        response = {"status_code": status, "request_id": number, "body": body}
        self._write({"custom_id": custom_id, "response": response, "error": failure}, failed=failure is not None)

    def end(self) -> None:
        """All items were read."""
        self._progress.unknown = len(self._done)

    def _write(self, line: dict[str, Any], *, failed: bool) -> None:
        self._output.append({"id": f"batch_req_{uuid.uuid4().hex}", **line})
        self._progress.failed += failed
        self._progress.answered += not failed
        self._tell(self._progress)


def server_of_job(options: ServerOptions) -> ServerOptions:
    """Return the options of a server that refuses none of a job's own requests: the job bounds them itself."""
    return replace(
        options, api_keys=(), host="127.0.0.1", fair_shares=False, max_requests=_NONE, max_reading_bytes=_NONE,
        max_stored_bytes=0,
    )  # fmt: skip


async def run_job(
    llm: AsyncLLM,
    options: ServerOptions,
    items: Iterator[Item | BadLine],
    output: OutputFile,
    *,
    concurrency: int,
    progress: Progress,
    tell: Callable[[Progress], None],
    metrics_port: MetricsPort | None = None,
) -> None:
    """Answer all items that the output does not hold; lines are written in the order in which answers are complete.

    Args:
        llm: the engine.
        options: the server's options: the model's names, its parsers and what requests may do.
        items: read only as fast as they are answered.
        output, progress, tell: see Ledger.
        concurrency: the most requests under way.
        metrics_port: shows the job's metrics, if there is one.

    Raises:
        EngineDeadError: the engine died; the items that it did not answer are not in the output.
        ConfigError: the input cannot be read or the output cannot be written.
    """
    options = server_of_job(options)
    service = Service(llm, options)
    app = service.app()
    for lora in options.loras:
        await llm.add_lora(lora)
    room, ledger = _Room(concurrency, _MAX_BYTES), Ledger(output, progress, tell)

    async def answer(item: Item) -> None:
        try:
            ledger.answer(item.custom_id, *await post_until_taken(app, llm, item.url, item.body))
        finally:
            room.leave(len(item.body))

    async def work() -> None:
        async with asyncio.TaskGroup() as group:
            for number, given in enumerate(items):
                if number % 256 == 0:
                    # Skipping many items leaves the loop no other moment.
                    await asyncio.sleep(0)
                item = ledger.take(given)
                if item is not None:
                    await room.enter(len(item.body))
                    group.create_task(answer(item))

    if metrics_port is not None:
        metrics_port.begin(service)
    try:
        with _first_error():
            await work()
    finally:
        if metrics_port is not None:
            metrics_port.end()
    ledger.end()


@contextlib.contextmanager
def _first_error() -> Iterator[None]:
    """Raise the first error of a task group instead of the group of them."""
    try:
        yield
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None


class _Room:
    """Bounds the requests under way by number and by bytes."""

    def __init__(self, number: int, size: int) -> None:
        self._number, self._size = number, size
        self._busy = self._held = 0
        self._left = asyncio.Event()

    async def enter(self, size: int) -> None:
        """Wait until there is room."""
        while self._busy and (self._busy >= self._number or self._held + size > self._size):
            self._left.clear()
            await self._left.wait()
        self._busy += 1
        self._held += size

    def leave(self, size: int) -> None:
        """Make room."""
        self._busy -= 1
        self._held -= size
        self._left.set()


async def post_until_taken(app: ASGIApp, llm: AsyncLLM, url: str, body: bytes) -> tuple[int, str, dict[str, Any]]:
    """The answer to an item, asked again while the engine has no room for it.

    Raises:
        EngineDeadError: the engine died.
    """
    while True:
        status, number, found = await post(app, url, body)
        if status >= 500 and not llm.alive:
            raise EngineDeadError(llm.reason, "Run the same command with --resume.")
        if status not in _BUSY:
            return status, number, found
        await asyncio.sleep(_RETRY_S)


async def post(app: ASGIApp, path: str, body: bytes) -> tuple[int, str, dict[str, Any]]:
    """Call an application as a server would: its status, the request's name and the JSON of its response.

    A transcript that is no JSON is put into an object, {"text": ...}.
    """
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [
            (b"host", b"localhost"),
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
        ],
        "client": ("127.0.0.1", 0),
        "server": None,
        "state": {},
    }
    given = [{"type": "http.request", "body": body, "more_body": False}]
    status, number, kind, parts = 0, "", b"", []

    async def receive() -> Message:
        if given:
            return given.pop()
        # The client of a job never disconnects.
        return await asyncio.get_running_loop().create_future()

    async def send(message: Message) -> None:
        nonlocal status, number, kind
        if message["type"] == "http.response.start":
            headers = dict(message["headers"])
            status, kind = message["status"], headers.get(b"content-type", b"")
            number = headers.get(b"x-request-id", b"").decode()
        else:
            parts.append(message.get("body", b""))

    await app(scope, receive, send)
    whole = b"".join(parts)
    return status, number, {"text": whole.decode()} if kind.startswith(b"text/") else json.loads(whole)


def _failure(body: dict[str, Any]) -> dict[str, Any]:
    error = body.get("error") or {}
    return {"code": error.get("code") or "error", "message": error.get("message") or "The request failed."}
