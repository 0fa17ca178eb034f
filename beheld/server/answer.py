"""How the chunks of an answer become a response: one body, a stream, or a stream that can be taken up again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from beheld.core.errors import CulpritError
from beheld.server import resume
from beheld.server.access_log import GONE
from beheld.server.admission import AdmissionControl, Hold
from beheld.server.clients import Clients
from beheld.server.errors import http_error
from beheld.server.json_pieces import LongJson
from beheld.server.long_json import LongResponse
from beheld.server.notes import Notes
from beheld.server.options import ServerOptions
from beheld.server.resume import RecordingStore
from beheld.server.schema import ChatRequest, Sampled
from beheld.server.stream import Chunk, EventStream, Gone, TextChunk, primed, until_gone
from beheld.utils.loop_share import LoopShare

Chunks = AsyncGenerator[Chunk, None]


@dataclass(frozen=True)
class AnswerForm:
    """How a route shows the chunks of an answer.

    Attributes:
        fold: folds them into one body.
        shown: those that a stream shows.
        response: makes the response of a body; None for JSON.
    """

    fold: Callable[[Chunks], Awaitable[dict[str, Any]]]
    shown: Callable[[Chunks], Chunks] = lambda chunks: chunks
    response: Callable[[dict[str, Any]], Response] | None = None


class AnswerSender:
    """Admits answers and sends them.

    Args:
        options: the server's.
        admission: admits them.
        clients: knows whose requests made steps fail.
        named: makes the name of a stream that can be taken up again.

    Attributes:
        turns: turns of the pieces of long answers.
    """

    def __init__(
        self,
        options: ServerOptions,
        admission: AdmissionControl,
        clients: Clients,
        named: Callable[[str], str] = "stream-{}".format,
    ) -> None:
        self._admission = admission
        self._clients = clients
        self._recordings = RecordingStore(options.max_recorded_bytes, admission, named=named)
        self._running: set[asyncio.Task[None]] = set()
        self.turns = LoopShare()

    async def send(
        self,
        request: Request,
        make: Callable[[], Chunks],
        answers: int,
        form: AnswerForm,
        *,
        stream: bool,
        owner: str | None,
        columns: Hold | None = None,
    ) -> Response:
        """The chunks as a stream or as one body. An error before the first chunk gets its own status.

        Args:
            request: the request, whose body is no longer held when the answer has ended.
            make: starts the answer.
            answers: how many there are.
            form: the route's.
            stream: whether it is a stream.
            owner: the client, if there are several.
            columns: holds the most bytes that log-probabilities of its prompts may take, if they are asked for.
        """
        client = request.state.held.client
        stack = self._admitted(client, answers, columns)
        has_columns = columns is not None and columns.size > 0

        def finished(error: Exception | None) -> None:
            request.state.held.release()
            stack.close()
            if error is not None:
                request.state.outcome = GONE if isinstance(error, Gone | OSError) else http_error(error).status

        try:
            chunks = self._blaming(make(), client)
            if not stream:
                body = await until_gone(_folded(chunks, form), request.receive)
                if form.response is not None:
                    stack.close()
                    return form.response(body)
                made = LongJson(body)
                if made.lists or has_columns or (columns is not None and columns.size > 0):
                    return LongResponse(made, self.turns, finished, request.state.names)
                stack.close()
                return Response(made.whole(), media_type=LongResponse.media_type)
            begun = await until_gone(primed(chunks), request.receive)
        except BaseException:
            stack.close()
            raise

        request.state.streamed = True
        if request.headers.get(resume.HEADER, "").lower() in ("true", "1") and self._recordings.max_bytes:
            recording = self._recordings.record(form.shown(begun), finished, request.state.names, owner or "")
            return resume.Follower(recording)
        return EventStream(form.shown(begun), finished, request.state.names, self.turns)

    def start(
        self, request: Request, make: Callable[[], Chunks], form: AnswerForm, columns: Hold | None = None
    ) -> asyncio.Task[None]:
        """An answer that continues without its client, who asks for the result later.

        What makes the chunks keeps an error after it has begun.
        """
        client = request.state.held.client
        stack = self._admitted(client, 1, columns)
        try:
            chunks = self._blaming(make(), client)
        except BaseException:
            stack.close()
            raise
        request.state.streamed = True

        async def run() -> None:
            with self._admission.known(), contextlib.suppress(Exception):
                await _folded(chunks, form)

        def ended(task: asyncio.Task[None]) -> None:
            # A task that is cancelled at once never runs.
            self._running.discard(task)
            request.state.held.release()
            stack.close()

        task = asyncio.create_task(run())
        self._running.add(task)
        task.add_done_callback(ended)
        return task

    def resumed(self, name: str, owner: str, last: str | None) -> Response:
        """The events after the one with the id `last` of a stream that was cut.

        Raises:
            HttpError: there is no such stream, or its events are no longer kept.
        """
        recording = self._recordings.get(name, owner)
        start = resume.start_of(last, recording.name)
        recording.check(start)
        return resume.Follower(recording, start)

    def columns(self, most: int, body: Sampled, client: str) -> Hold:
        """Hold the most bytes of a request's log-probabilities, until its answer has ended."""
        answers = "top_logprobs" if isinstance(body, ChatRequest) else "logprobs"
        answers = "logprob_token_ids" if body.logprob_token_ids else answers
        named = "prompt_logprob_token_ids"
        answers = named if getattr(body, named, None) is not None else answers
        prompts = body.prompt_logprobs is not None or getattr(body, "echo", None) is True
        return self._admission.hold_columns(most, "prompt_logprobs" if prompts else answers, client)

    def _admitted(self, client: str, answers: int, columns: Hold | None) -> contextlib.ExitStack:
        """What an answer holds until it has ended.

        Raises:
            HttpError: 429 or 503.
        """
        with contextlib.ExitStack() as refused:
            if columns is not None:
                refused.enter_context(columns)
            self._clients.check(client)
            refused.enter_context(self._admission.admitted(max(1, answers), client))
            return refused.pop_all()

    async def _blaming(self, chunks: Chunks, client: str) -> Chunks:
        """The same chunks; a request that makes a step fail counts against its client."""
        try:
            async with contextlib.aclosing(chunks):
                async for chunk in chunks:
                    yield chunk
        except CulpritError:
            self._clients.blame(client)
            raise


async def _folded(chunks: Chunks, form: AnswerForm) -> dict[str, Any]:
    async with contextlib.aclosing(chunks):
        return await form.fold(chunks)


def warned(chunks: Chunks, notes: Notes) -> Chunks:
    """The chunks, the first of which names the fields without effect; all of these must be noted before."""
    warnings = notes.warnings()
    return _warned(chunks, warnings) if warnings else chunks


async def _warned(chunks: Chunks, warnings: list[dict[str, Any]]) -> Chunks:
    async with contextlib.aclosing(chunks):
        async for chunk in chunks:
            yield {**chunk, "warnings": warnings} if warnings else chunk
            warnings = []


async def shown(chunks: Chunks, *, usage: bool) -> Chunks:
    """The chunks of a stream, with the usage only if it was requested."""
    async with contextlib.aclosing(chunks):
        async for chunk in chunks:
            if usage:
                yield chunk.with_null_usage() if isinstance(chunk, TextChunk) else {"usage": None, **chunk}
            elif "usage" not in chunk:
                yield chunk
