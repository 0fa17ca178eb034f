"""POST /v1/responses: the events of a response, made of chat's chunks."""

from __future__ import annotations

import contextlib
import itertools
from bisect import bisect_left, bisect_right
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from beheld.server.chat import ChunkHead
from beheld.server.custom_tools import arguments_of, input_of
from beheld.server.errors import HttpError, http_error
from beheld.server.json_pieces import LongJson, LongList
from beheld.server.notes import Notes
from beheld.server.response_requests import ResponseAsked
from beheld.server.response_store import ResponseStore, Stored, TokenEntries
from beheld.server.responses_schema import AllowedNames, FreeformTool, NamedFunction, NamespaceTool, flat_name
from beheld.server.stream import Chunk, LongChunk
from beheld.utils.loop_share import LoopShare


class ResponseEvents:
    """One response: its object, and its events.

    Args:
        ask: the request.
        head: the common part of the answer's chunks.
        notes: what the request asked for without effect.
        store: keeps the response, if the request does not say otherwise.
        owner: the client, for the store.
        turns: what the response repeats of a large request is written at its turn; None if the request is small.
    """

    def __init__(
        self,
        ask: ResponseAsked,
        head: ChunkHead,
        notes: Notes,
        store: ResponseStore,
        owner: str,
        turns: LoopShare | None = None,
    ) -> None:
        self._ask = ask
        self._store = store
        self._background = ask.given.background is True
        self._wanted = ask.given.store is not False
        self._response = _object(ask, head, notes)
        self._kept = Stored(owner, self._response, tuple(ask.history), ask.history_bytes)
        self._number = 0
        self._turns = turns

    def queue(self) -> Stored:
        """Keep the response before it begins, for a client that asks for it later.

        Raises:
            HttpError: there is no room for it.
        """
        self._response["status"] = "queued"
        self._response["store"] = True
        if not self._store.put(self._kept):
            raise HttpError(
                400,
                "There is no room to keep a response that is answered in the background.",
                "Wait for it. The operator may raise --response-store-mib.",
                param="background",
            )
        return self._kept

    async def events(self, chunks: AsyncGenerator[Chunk, None]) -> AsyncGenerator[Chunk, None]:
        """The events, the last of which has the whole response."""
        begun, ended = False, False
        reason, usage = "stop", None
        custom = frozenset(tool.name for tool in self._ask.given.tools or () if isinstance(tool, FreeformTool))
        spaces = {
            seen.name: (own.name, tool.name)
            for tool in self._ask.given.tools or ()
            if isinstance(tool, NamespaceTool)
            for seen, own in zip(tool.functions(), tool.tools, strict=True)
        }
        items = _OutputItems(self._response["output"], self._response["id"].removeprefix("resp"), custom, spaces)
        raw = _RawMessages() if self._ask.given.enable_response_messages else None
        try:
            async with contextlib.aclosing(chunks):
                async for chunk in chunks:
                    if raw is not None:
                        raw.push(chunk)
                    if chunk.get("media"):
                        self._response["media"] = chunk["media"]
                    if not begun:
                        begun = True
                        await self._turn()
                        for event in self._begin(chunk):
                            yield event
                            await self._turn()
                    for choice in chunk["choices"]:
                        for event in items.push(choice["delta"], (choice.get("logprobs") or {}).get("content", ())):
                            yield self._numbered(event)
                        reason = choice["finish_reason"] or reason
                        if "grounding" in choice:
                            self._response["grounding"] = choice["grounding"]
                    usage = chunk.get("usage") or usage
            if usage:
                self._response["usage"] = _usage(usage)
            if raw is not None:
                self._response |= raw.fields()
            for event in items.close(complete=reason not in ("length", "abort")):
                yield self._numbered(event)
            await self._turn()
            ended = True
            yield self._end(reason)
        except Exception as error:
            if self._background:
                # Nobody else makes a response of it.
                fields = http_error(error, self._ask.names).fields("server_error")
                self._response["error"] = {name: fields[name] for name in ("code", "message")}
            raise
        finally:
            self._kept.over.set()
            if not ended:
                # The client went away, or the request failed: nobody can go on with half an answer.
                self._response["status"] = "failed" if self._response["error"] or not self._background else "cancelled"
                if self._background:
                    self._store.forget_history(self._kept)
                else:
                    self._store.discard(self._response["id"])

    async def _turn(self) -> None:
        if self._turns is not None:
            await self._turns.turn()

    def _begin(self, chunk: Chunk) -> Iterator[Chunk]:
        self._response["status"] = "in_progress"
        # Now that the media are prepared, the request's body is counted here and nowhere else.
        self._response["store"] = self._wanted and self._keeps() and self._store.put(self._kept)
        if not self._response["store"]:
            self._kept.history, self._kept.history_bytes = (), 0
            self._ask.history.clear()
        for kind in ("created", "in_progress"):
            yield self._numbered({"type": f"response.{kind}", "response": {**self._response, "output": []}})

    def _keeps(self) -> bool:
        """Whether the response may still be kept: one in the background may have been deleted."""
        return not self._background or self._store.holds(self._response["id"])

    def _end(self, reason: str) -> Chunk:
        response = self._response
        response["status"] = {"length": "incomplete", "abort": "cancelled"}.get(reason, "completed")
        if reason == "length":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        if response["store"] and self._store.holds(response["id"]):
            self._kept.go_on(_answer(response["output"]))
            response["store"] = self._store.put(self._kept)
        # Before the event is sent, for which a slow client may take its time.
        self._kept.over.set()
        kind = "completed" if response["status"] == "completed" else "incomplete"
        return self._numbered({"type": f"response.{kind}", "response": response})

    def _numbered(self, event: Chunk) -> Chunk:
        self._number += 1
        numbered: Chunk = {"type": event["type"], "sequence_number": self._number - 1, **event}
        shown = _in_pieces(numbered)
        return numbered if shown is numbered else LongChunk(shown)


class _RawMessages:
    """What the model read and what it wrote, as texts and as tokens."""

    def __init__(self) -> None:
        self._prompt, self._answer = "", list[str]()
        self._read, self._written = TokenEntries(), TokenEntries()

    def push(self, chunk: Chunk) -> None:
        """Note what a chunk has of it."""
        if "prompt_token_ids" in chunk:
            self._prompt, self._read = chunk.get("prompt_text") or "", TokenEntries(chunk["prompt_token_ids"])
        for choice in chunk["choices"]:
            if "raw_text" in choice:
                self._answer.append(choice["raw_text"])
                self._written += choice["token_ids"]

    def fields(self) -> dict[str, Any]:
        """The response's fields."""
        both = {"input_messages": (self._prompt, self._read), "output_messages": ("".join(self._answer), self._written)}
        kind = {"type": "raw_message_tokens"}
        return {name: [{"message": text, "tokens": tokens, **kind}] for name, (text, tokens) in both.items()}


# Entries of tokens beyond which they are written in pieces.
_FEW = 32


def in_pieces(response: dict[str, Any]) -> LongJson:
    """The JSON of a response, whose tokens and log-probabilities may be many."""
    return LongJson(_in_pieces(response))


def _in_pieces(value: dict[str, Any]) -> dict[str, Any]:
    """The same object, or a copy in which long lists of tokens are written in pieces."""
    fresh: dict[str, Any] = {}
    for name, entry in value.items():
        if name in _OF_TOKENS:
            if isinstance(entry, list) and len(entry) > _FEW:
                fresh[name] = LongList(partial(iter, entry[:]))
        elif name in _HOLDERS and isinstance(entry, dict):
            found = _in_pieces(entry)
            if found is not entry:
                fresh[name] = found
        elif name in _LISTS and isinstance(entry, list):
            items = [_in_pieces(each) if isinstance(each, dict) else each for each in entry]
            if any(one is not other for one, other in zip(items, entry, strict=True)):
                fresh[name] = items
    return {**value, **fresh} if fresh else value


# Where objects with entries of tokens stand in events and in responses.
_OF_TOKENS = frozenset(("logprobs", "tokens"))
_HOLDERS = frozenset(("response", "part", "item"))
_LISTS = frozenset(("output", "content", "input_messages", "output_messages"))


def _usage(given: dict[str, Any]) -> dict[str, Any]:
    """Responses' usage object, made of chat's."""
    return {
        "input_tokens": given["prompt_tokens"],
        # No tokens are billed for writing them into a cache.
        "input_tokens_details": {**given["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": given["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0, **given.get("completion_tokens_details", {})},
        "total_tokens": given["total_tokens"],
    }


async def fold(events: AsyncIterator[Chunk]) -> dict[str, Any]:
    """The whole response, which the last event has."""
    last: Chunk = {}
    async for event in events:
        last = event
    response: dict[str, Any] = last["response"]
    return response


def _object(ask: ResponseAsked, head: ChunkHead, notes: Notes) -> dict[str, Any]:
    given = ask.given
    form = None if given.text is None or given.text.format is None else given.text.format
    choice = given.tool_choice
    made: dict[str, Any] = {
        "id": head.id,
        "object": "response",
        "created_at": head.created,
        "status": "in_progress",
        "background": given.background is True,
        "error": None,
        "incomplete_details": None,
        "instructions": given.instructions,
        "max_output_tokens": given.max_output_tokens,
        "metadata": given.metadata or {},
        "model": head.model,
        "output": [],
        "parallel_tool_calls": given.parallel_tool_calls is not False,
        "previous_response_id": given.previous_response_id,
        "reasoning": {"effort": ask.body.reasoning_effort, "summary": None},
        "store": False,
        "temperature": given.temperature,
        "text": {"format": {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)},
        "tool_choice": choice.model_dump() if isinstance(choice, NamedFunction | AllowedNames) else choice or "auto",
        "tools": [tool.model_dump() for tool in given.tools or ()],
        "top_logprobs": given.top_logprobs or 0,
        "top_p": given.top_p,
        "truncation": "disabled",
        "usage": None,
    }
    return made | ({"warnings": notes.warnings()} if notes.fields else {})


def _answer(output: list[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """The output as a message of the assistant, as chat takes it."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for item in output:
        if item["type"] == "message":
            message["content"] += "".join(part["text"] for part in item["content"])
        elif item["type"] == "reasoning":
            message["reasoning_content"] = "".join(part["text"] for part in item["content"])
        else:
            custom = item["type"] == "custom_tool_call"
            arguments = arguments_of(item["input"]) if custom else item["arguments"]
            function = {"name": flat_name(item["name"], item.get("namespace")), "arguments": arguments}
            call = {"id": item["call_id"], "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)
    return (message,)


def _place_of(text: str, entries: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """The number of entries before those of a text, and up to its end; zeros if it is not found."""
    raw = b"".join(bytes(entry["bytes"]) for entry in entries)
    begin = raw.find(text.encode())
    if begin < 0:
        return 0, 0
    end = begin + len(text.encode())
    ends = list(itertools.accumulate(len(entry["bytes"]) for entry in entries))
    return bisect_right(ends, begin), bisect_left(ends, end) + 1


_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}


class _OutputItems:
    """Turns chat's deltas into output items and the events that add to them.

    Args:
        output: the response's items, which grow.
        number: the end of the items' ids.
        custom: the names of the custom tools.
        spaces: the name that the model sees -> name and namespace of a function that has one.
    """

    def __init__(
        self,
        output: list[dict[str, Any]],
        number: str,
        custom: frozenset[str],
        spaces: Mapping[str, tuple[str, str]],
    ) -> None:
        self._output = output
        self._number = number
        self._custom = custom
        self._spaces = spaces
        # The arguments of an open call of a custom tool, whose input is known when they are whole.
        self._arguments = ""
        # Log-probabilities of tokens whose text is not shown yet.
        self._logprobs: list[dict[str, Any]] = []
        # Whether reasoning has been shown since the last text.
        self._between = False
        # The kind of the open item, and the index of its call.
        self._open: tuple[str, int] | None = None

    def push(self, delta: dict[str, Any], logprobs: Sequence[dict[str, Any]] = ()) -> Iterator[Chunk]:
        """The events of a delta; `logprobs` are entries of its tokens, which only the answer's text shows."""
        self._logprobs += logprobs
        if delta.get("reasoning_content"):
            item = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": ""}]}
            yield from self._begin(("reasoning", 0), item)
            yield from self._grow("content", "response.reasoning_text.delta", delta["reasoning_content"])
            # An answer that is not streamed comes with all entries at once.
            _, behind = _place_of(delta["reasoning_content"], self._logprobs)
            del self._logprobs[:behind]
            self._between = True
        if delta.get("content"):
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": TokenEntries()}
            yield from self._begin(("message", 0), {"type": "message", "role": "assistant", "content": [part]})
            if self._between:
                # The mark that ends reasoning is no part of the text.
                del self._logprobs[: _place_of(delta["content"], self._logprobs)[0]]
                self._between = False
            entries, self._logprobs = self._logprobs, []
            self._output[-1]["content"][0]["logprobs"] += entries
            yield from self._grow("content", "response.output_text.delta", delta["content"], entries)
        for call in delta.get("tool_calls", ()):
            name = call["function"].get("name")
            kind, holder = ("custom_tool_call", "input") if name in self._custom else ("function_call", "arguments")
            item = {"type": kind, "call_id": call.get("id"), "name": name, holder: ""}
            if name in self._spaces:
                item["name"], item["namespace"] = self._spaces[name]
            yield from self._begin(("call", call["index"]), item)
            if self._output[-1]["type"] == "custom_tool_call":
                self._arguments += call["function"]["arguments"]
            elif call["function"]["arguments"]:
                kind = "response.function_call_arguments.delta"
                yield from self._grow("arguments", kind, call["function"]["arguments"])

    def close(self, *, complete: bool) -> Iterator[Chunk]:
        """The events that end the open item."""
        if self._open is None:
            return
        self._open = None
        item, place = self._output[-1], self._place()
        item["status"] = "completed" if complete else "incomplete"
        if item["type"] == "custom_tool_call":
            item["input"], self._arguments = input_of(self._arguments), ""
            yield {"type": "response.custom_tool_call_input.delta", **place, "delta": item["input"]}
            yield {"type": "response.custom_tool_call_input.done", **place, "input": item["input"]}
        elif item["type"] == "function_call":
            yield {
                "type": "response.function_call_arguments.done",
                **place,
                "name": item["name"],
                "arguments": item["arguments"],
            }
        else:
            (part,) = item["content"]
            kind = part["type"]
            more: dict[str, Any] = {"logprobs": part["logprobs"]} if kind == "output_text" else {}
            yield {"type": f"response.{kind}.done", **place, "content_index": 0, "text": part["text"], **more}
            yield {"type": "response.content_part.done", **place, "content_index": 0, "part": dict(part)}
        yield {"type": "response.output_item.done", "output_index": len(self._output) - 1, "item": item}

    def _begin(self, kind: tuple[str, int], item: dict[str, Any]) -> Iterator[Chunk]:
        if self._open == kind:
            return
        yield from self.close(complete=True)
        self._open = kind
        prefix = _PREFIXES[item["type"]]
        item |= {"id": f"{prefix}-{len(self._output)}{self._number}", "status": "in_progress"}
        self._output.append(item)
        shown = {**item, "content": []} if "content" in item else dict(item)
        yield {"type": "response.output_item.added", "output_index": len(self._output) - 1, "item": shown}
        if "content" in item:
            # What is added later is no part of this event.
            part = {
                name: list(value) if isinstance(value, list) else value for name, value in item["content"][0].items()
            }
            yield {"type": "response.content_part.added", **self._place(), "content_index": 0, "part": part}

    def _grow(self, name: str, kind: str, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> Iterator[Chunk]:
        item = self._output[-1]
        if name == "arguments":
            item["arguments"] += text
            yield {"type": kind, **self._place(), "delta": text}
            return
        item["content"][0]["text"] += text
        more: dict[str, Any] = {"logprobs": list(logprobs)} if item["type"] == "message" else {}
        yield {"type": kind, **self._place(), "content_index": 0, "delta": text, **more}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}
