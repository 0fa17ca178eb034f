"""OpenAI's chunks of every answer, streamed one by one or folded into one body."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from json.encoder import encode_basestring
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from beheld.core.outputs import CompletionOutput, RequestOutput
from beheld.server.errors import DIALECT, Dialect, HttpError, http_error
from beheld.server.field_names import NO_NAMES, FieldNames
from beheld.server.json_pieces import LongJson
from beheld.utils.loop_share import LoopShare

Chunk = dict[str, Any]
Finished = Callable[[Exception | None], None]
# What stands for a logarithm of zero, which JSON has no number for.
LEAST = -9999.0
SSE_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
# Made once, because json.dumps with options makes an encoder at every call.
_encoded = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def usage_of(output: RequestOutput, completion_tokens: int, reasoning_tokens: int | None = None) -> dict[str, Any]:
    """OpenAI's usage object; `reasoning_tokens` is what the reasoning's text takes; None leaves it out."""
    prompt = output.usage.prompt_tokens
    reasoned = None if reasoning_tokens is None else {"reasoning_tokens": min(reasoning_tokens, completion_tokens)}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": output.num_cached_tokens},
        **({} if reasoned is None else {"completion_tokens_details": reasoned}),
    }


def media_of(output: RequestOutput) -> list[dict[str, Any]]:
    """The receipts as JSON."""
    return [receipt.to_json() for receipt in output.media]


def token_name(token_id: int) -> str:
    """How a token is written where a request asks for ids in place of texts."""
    return f"token_id:{token_id}"


def grounding_of(answer: CompletionOutput) -> dict[str, Any]:
    """The field of a choice with what the answer located; empty if nobody asked, or the answer is not finished."""
    return {} if answer.grounding is None else {"grounding": [found.to_json() for found in answer.grounding]}


async def fold(chunks: AsyncIterator[Chunk], kind: str) -> dict[str, Any]:
    """Fold a request's chunks into one body. `kind` is its object name."""
    body: dict[str, Any] = {}
    choices: dict[int, dict[str, Any]] = {}
    async for chunk in chunks:
        for name, value in chunk.items():
            if name != "choices" and value is not None:
                body[name] = value
        for choice in chunk["choices"]:
            known = choices.setdefault(choice["index"], {"index": choice["index"]})
            _merge(known, {k: v for k, v in choice.items() if k != "index"})
    made = [_as_message(choices[index]) for index in sorted(choices)]
    usage = body.pop("usage", None)
    media = body.pop("media", None)
    body |= {"object": kind, "choices": made, "usage": usage}
    # Scripts read these fields of every answer.
    prompts = [body] if kind == "chat.completion" else made
    for of_prompt in prompts:
        of_prompt |= {name: of_prompt.get(name) for name in ("prompt_logprobs", "prompt_token_ids")}
    for choice in made:
        choice.setdefault("token_ids", None)
    return body if media is None else {**body, "media": media}


def _merge(known: dict[str, Any], fresh: dict[str, Any]) -> None:
    """Merge a chunk: texts and lists grow, objects are merged, other values are replaced; None changes nothing."""
    for name, value in fresh.items():
        before = known.get(name)
        if value is None:
            known.setdefault(name, None)
        elif name == "tool_calls":
            _merge_calls(known.setdefault(name, []), value)
        elif isinstance(before, list) or (isinstance(before, str) and name != "role"):
            known[name] = before + value
        elif isinstance(before, dict):
            _merge(before, value)
        else:
            known[name] = dict(value) if isinstance(value, dict) else value


def _merge_calls(known: list[dict[str, Any]], fresh: list[dict[str, Any]]) -> None:
    for call in fresh:
        kind, holder = ("custom", "input") if "custom" in call else ("function", "arguments")
        if call["index"] == len(known):
            known.append({"id": call["id"], "type": kind, kind: dict(call[kind])})
        else:
            known[call["index"]][kind][holder] += call[kind][holder]


def _as_message(choice: dict[str, Any]) -> dict[str, Any]:
    """A folded choice, with its delta as its message."""
    if "delta" in choice:
        message = choice.pop("delta")
        if not message.get("content") and ("tool_calls" in message or "reasoning_content" in message):
            message["content"] = None
        # Clients read the field of every message.
        message.setdefault("reasoning", None)
        return {"index": choice.pop("index"), "message": message, **choice}
    return choice


class EventStream(Response):
    """Chunks as server-sent events, until the end or until the client disconnects.

    An error after the first chunk is sent as an event, because the status was already sent.

    Args:
        chunks: the chunks; the generator is closed at the end in any case.
        finished: called once at the end, with the error if there is one: HttpError, or Gone if the client disconnected.
        names: the client's field names, for errors.
        turns: turns of the pieces of long events.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        chunks: AsyncGenerator[Chunk, None],
        finished: Finished,
        names: FieldNames = NO_NAMES,
        turns: LoopShare | None = None,
    ) -> None:
        super().__init__(headers=SSE_HEADERS)
        del self.headers["content-length"]
        self._turns = turns or LoopShare()
        self._chunks = chunks
        self._finished = finished
        self._names = names
        self._dialect = DIALECT.get()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all chunks; a client that disconnects ends it."""
        try:
            await until_gone(self._send(send, scope.get("state", {}).get("write_piece")), receive)
        except (Gone, OSError) as error:
            self._finished(error)
        except BaseException:
            self._finished(Gone())
            raise
        finally:
            await self._chunks.aclose()

    async def _send(self, send: Send, write: Callable[[bytes], bool] | None) -> None:
        """Send all chunks; `write` is the connection's short way for a piece of a body, see DeadlineProtocol."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        failure: HttpError | None = None
        try:
            async for chunk in self._chunks:
                if isinstance(chunk, LongChunk):
                    for piece in event_pieces(chunk, self._dialect):
                        await self._turns.turn()
                        await send({"type": "http.response.body", "body": piece, "more_body": True})
                    continue
                event = event_of(chunk, self._dialect)
                if write is None or not write(event):
                    await send({"type": "http.response.body", "body": event, "more_body": True})
        except OSError:
            raise
        except Exception as error:
            failure = http_error(error, self._names)
            last = event_of(failure.event(), self._dialect)
            await send({"type": "http.response.body", "body": last, "more_body": True})
        await send({"type": "http.response.body", "body": self._dialect.last_event, "more_body": False})
        self._finished(failure)


class TextChunk(Chunk):
    """A chunk that only adds to an answer's text, and its JSON; nobody changes it.

    Most chunks of a stream are such, and differ in the text alone, so the rest is not encoded again for each.
    """

    __slots__ = ("json",)

    def __init__(self, head: Chunk, head_json: str, index: int, text: str) -> None:
        choice = {"index": index, "delta": {"content": text}, "logprobs": None, "finish_reason": None}
        super().__init__(head, choices=[choice])
        quoted = encode_basestring(text)
        self.json = (
            f'{head_json},"choices":[{{"index":{index},"delta":{{"content":{quoted}}}'
            ',"logprobs":null,"finish_reason":null}]}'
        )

    @classmethod
    def maker(cls, head: Chunk) -> Callable[[int, str], TextChunk]:
        """A function that makes the chunk of an answer's index and text, with these first fields."""
        return partial(cls, head, _encoded(head)[:-1])

    def with_null_usage(self) -> TextChunk:
        """The same chunk after the field `usage`, null."""
        made = TextChunk.__new__(TextChunk)
        made.update({"usage": None}, **self)
        made.json = '{"usage":null,' + self.json[1:]
        return made


class LongChunk(Chunk):
    """A chunk that holds long lists, which is written in pieces."""

    __slots__ = ()


def event_of(chunk: Chunk, dialect: Dialect) -> bytes:
    """One server-sent event."""
    written = chunk.json if isinstance(chunk, TextChunk) else _encoded(chunk)
    return _name(chunk, dialect) + b"data: " + written.encode() + b"\n\n"


def event_pieces(chunk: LongChunk, dialect: Dialect) -> Iterator[bytes]:
    """The pieces of one server-sent event."""
    yield _name(chunk, dialect) + b"data: "
    yield from LongJson(chunk).pieces()
    yield b"\n\n"


def _name(chunk: Chunk, dialect: Dialect) -> bytes:
    return b"event: " + chunk["type"].encode() + b"\n" if dialect.named_events else b""


class Gone(Exception):
    """The client disconnected."""


async def until_gone(work: Any, receive: Receive) -> Any:
    """The result of a coroutine, which is cancelled if the client disconnects.

    Raises:
        Gone: the client disconnected.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise Gone
    finally:
        for other in (task, watch):
            if not other.done():
                other.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await other


async def _disconnected(receive: Receive) -> None:
    # Ray Serve's raises when the request has ended, be it with the last chunk of its answer.
    with contextlib.suppress(Exception):
        while (await receive())["type"] != "http.disconnect":
            pass


async def primed(chunks: AsyncGenerator[Chunk, None]) -> AsyncGenerator[Chunk, None]:
    """The same chunks after awaiting the first, so that an earlier error can still set the status."""
    first = await anext(chunks, None)

    async def rest() -> AsyncGenerator[Chunk, None]:
        async with contextlib.aclosing(chunks):
            if first is not None:
                yield first
            async for chunk in chunks:
                yield chunk

    return rest()


def logprobs_of(
    token_ids: Sequence[int],
    logprobs: Iterable[Mapping[int, Any]],
    num_top: int,
    bytes_of: Callable[[int], bytes],
    *,
    as_ids: bool,
    named: bool,
) -> Iterator[dict[str, Any]]:
    """OpenAI's log-probability entries for chat, one by one: each token with its best `num_top` candidates.

    `bytes_of` returns a token's own bytes, of which its text may hold more or less. With `as_ids`, a token is written
    as `token_name` does. If the candidates were `named`, all are given, the token itself first.
    """
    for token_id, candidates in zip(token_ids, logprobs, strict=True):
        if named:
            top = [_entry(found, one, bytes_of, as_ids) for one, found in candidates.items()]
        else:
            ranked = sorted(candidates.items(), key=lambda pair: pair[1].rank or 0)
            top = [_entry(found, one, bytes_of, as_ids) for one, found in ranked if (found.rank or 0) <= num_top]
        yield {**_entry(candidates[token_id], token_id, bytes_of, as_ids), "top_logprobs": top}


def _entry(found: Any, token_id: int, bytes_of: Callable[[int], bytes], as_ids: bool) -> dict[str, Any]:
    text = found.decoded_token or ""
    spelt = text.encode() if text.isascii() and text else bytes_of(token_id)
    return {
        "token": token_name(token_id) if as_ids else text,
        "logprob": max(found.logprob, LEAST),
        "bytes": list(spelt),
    }
