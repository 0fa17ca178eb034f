"""POST /v2/chat: Cohere's API over the chat route's chunks."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from beheld.server.chat import ChunkHead
from beheld.server.cohere_schema import (
    CohereAssistant,
    CohereChatRequest,
    CohereDocument,
    CohereDocumentPart,
    CohereFormat,
    CohereMessage,
    CohereTool,
)
from beheld.server.errors import HttpError
from beheld.server.field_names import FieldNames
from beheld.server.json_pieces import LongList
from beheld.server.messages import SWITCH, Asked
from beheld.server.notes import Notes
from beheld.server.parts_schema import TextPart
from beheld.server.read import checked
from beheld.server.schema import ChatRequest
from beheld.server.stream import Chunk
from beheld.server.template_options import DOCUMENTS

_REASONS = {"stop": "COMPLETE", "length": "MAX_TOKENS", "tool_calls": "TOOL_CALL", "repetition": "COMPLETE"}
_SAME = (
    *("model", "max_tokens", "stream", "temperature", "seed", "frequency_penalty", "presence_penalty", "logprobs"),
    *("cache_salt", "priority"),
)


def asked(given: CohereChatRequest, notes: Notes, *, template: str, bounded: bool) -> Asked:
    """The request as one of chat's.

    Args:
        given: the request.
        notes: gets what has no effect here.
        template: the model's chat template.
        bounded: the server can end reasoning.

    Raises:
        HttpError: fields contradict each other.
    """
    made: dict[str, Any] = {name: getattr(given, name) for name in _SAME}
    made |= {"stop": given.stop_sequences, "top_k": given.k, "top_p": given.p, "messages": _messages(given)}
    if given.stop_sequences == []:
        made["stop"] = None
    # Of log-probabilities the answer has the tokens' ids, too.
    made["return_token_ids"] = given.logprobs
    if given.tools:
        strict = {"strict": True} if given.strict_tools else {}
        made["tools"] = [
            {"type": "function", "function": tool.function.model_dump(exclude_none=True) | strict}
            for tool in given.tools
        ]
    elif given.tool_choice == "REQUIRED":
        raise HttpError(400, "tool_choice is REQUIRED, but there are no tools.", "Send tools.", param="tool_choice")
    made["tool_choice"] = None if given.tool_choice is None or not given.tools else given.tool_choice.lower()
    made["response_format"] = _format(given.response_format)
    variables: dict[str, Any] = {}
    if given.thinking is not None:
        if SWITCH in template:
            variables[SWITCH] = given.thinking.type == "enabled"
        else:
            notes.tell(
                "thinking", "This model's template has no switch for reasoning: it reasons as it was trained to."
            )
        if given.thinking.token_budget is not None and bounded:
            made["thinking_token_budget"] = given.thinking.token_budget
        elif given.thinking.token_budget is not None:
            notes.tell("thinking.token_budget", "Reasoning has no bound of its own; max_tokens bounds it.")
    if given.documents:
        if DOCUMENTS in template:
            made["documents"] = [_fields(document) for document in given.documents]
        else:
            _put_documents(made["messages"], given.documents)
            notes.tell(DOCUMENTS, "This model's template has no place for them: they stand in the last user's message.")
    renamed = {
        "stop": "stop_sequences",
        "top_k": "k",
        "top_p": "p",
        "lora_request": "model",
        "structured_outputs": "response_format" if made["response_format"] is not None else "tools",
        "thinking_token_budget": "thinking.token_budget",
    }
    # Documents and strict tools may make it larger than a request may be; the client's variables were checked.
    template_kwargs = {**variables, **(given.chat_template_kwargs or {})} or None
    body = checked(made, ChatRequest).model_copy(update={"chat_template_kwargs": template_kwargs})
    return Asked(body, FieldNames("messages", fields=renamed))


def counted(body: ChatRequest) -> ChatRequest:
    """The request as its log-probabilities are counted: an answer keeps those of each token, as if of one candidate."""
    return body.model_copy(update={"top_logprobs": 1}) if body.logprobs else body


def _messages(given: CohereChatRequest) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    for message in given.messages:
        if isinstance(message, CohereAssistant):
            made.append(_assistant(message))
        elif isinstance(message, CohereTool):
            made.append({"role": "tool", "tool_call_id": message.tool_call_id, "content": _result(message)})
        else:
            role = "system" if message.role == "developer" else message.role
            made.append({"role": role, "content": _content(message)})
    return made


def _content(message: CohereMessage) -> Any:
    if not isinstance(message.content, list):
        return message.content
    parts = message.content
    if all(isinstance(part, TextPart) for part in parts):
        # Templates know plain texts best.
        return "".join(part.text for part in parts if isinstance(part, TextPart))
    return [part.model_dump(exclude_none=True) for part in parts]


def _assistant(message: CohereAssistant) -> dict[str, Any]:
    """One message with its text, reasoning and calls."""
    made: dict[str, Any] = {"role": "assistant", "content": ""}
    for part in message.content if isinstance(message.content, list) else ():
        if isinstance(part, TextPart):
            made["content"] += part.text
        else:
            made["reasoning_content"] = made.get("reasoning_content", "") + part.thinking
    if isinstance(message.content, str):
        made["content"] = message.content
    if message.tool_plan and not made["content"]:
        made["content"] = message.tool_plan
    if message.tool_calls:
        made["tool_calls"] = [call.model_dump(exclude_none=True) for call in message.tool_calls]
    return made


def _result(message: CohereTool) -> str:
    """What a tool returned, as a text."""
    if isinstance(message.content, str):
        return message.content
    texts = [_text(part.document) if isinstance(part, CohereDocumentPart) else part.text for part in message.content]
    return "\n".join(texts)


def _text(document: CohereDocument | str) -> str:
    """A document as the text that it is, or as JSON."""
    if isinstance(document, str):
        return document
    named = {} if document.id is None else {"id": document.id}
    data = document.data
    return data if isinstance(data, str) and not named else json.dumps({**named, "data": data}, ensure_ascii=False)


def _fields(document: CohereDocument | str) -> dict[str, Any]:
    """A document as templates read it."""
    if isinstance(document, str):
        return {"text": document}
    named = {} if document.id is None else {"id": document.id}
    return {**named, **(document.data if isinstance(document.data, dict) else {"text": document.data})}


def _put_documents(messages: list[dict[str, Any]], documents: Sequence[CohereDocument | str]) -> None:
    """Write the documents before what the user said last."""
    text = "".join(f"Document {number}: {_text(document)}\n\n" for number, document in enumerate(documents, 1))
    last = next((message for message in reversed(messages) if message["role"] == "user"), None)
    if last is None:
        messages.append({"role": "user", "content": text})
    elif isinstance(last["content"], str):
        last["content"] = f"{text}{last['content']}"
    else:
        last["content"].insert(0, {"type": "text", "text": text})


def _format(given: CohereFormat | None) -> dict[str, Any] | None:
    if given is None or given.type == "text":
        return None
    schema = given.schema_ if given.json_schema is None else given.json_schema
    if schema is None:
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"schema": schema}}


# ---------------------------------------------------------------------- answers


async def events(chunks: AsyncGenerator[Chunk, None], head: ChunkHead, notes: Notes) -> AsyncGenerator[Chunk, None]:
    """The events of an answer, made of chat's chunks."""
    blocks = _Events()
    reason, stop = None, None
    usage: dict[str, Any] = {}
    more: dict[str, Any] = {"warnings": warnings} if (warnings := notes.warnings()) else {}
    begun = {"role": "assistant", "content": [], "tool_plan": "", "tool_calls": [], "citations": []}
    started = False
    async with contextlib.aclosing(chunks):
        async for chunk in chunks:
            if not started:
                started = True
                yield {"type": "message-start", "id": head.id, "delta": {"message": begun}}
            if chunk.get("media"):
                more["media"] = chunk["media"]
            for choice in chunk["choices"]:
                for event in blocks.push(choice):
                    yield event
                if choice["finish_reason"] is not None:
                    reason, stop = choice["finish_reason"], choice["stop_reason"]
            usage = chunk.get("usage") or usage
    for event in blocks.finish():
        yield event
    shown = "STOP_SEQUENCE" if reason == "stop" and isinstance(stop, str) else _REASONS.get(reason or "stop", "ERROR")
    yield {"type": "message-end", "id": head.id, "delta": {"finish_reason": shown, "usage": _usage(usage)}, **more}


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    counts = {"input_tokens": usage.get("prompt_tokens", 0), "output_tokens": usage.get("completion_tokens", 0)}
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return {"billed_units": counts, "tokens": dict(counts), "cached_tokens": cached}


@dataclass
class _Events:
    """Turns chat's deltas into the events of content blocks and calls.

    Log-probabilities belong to the first delta of their chunk. Those of tokens without a text come with the block that
    is open, or else with the next one.

    Attributes:
        open: the kind of the open block ("text", "thinking" or "call"), and its index; None if none is open.
        number: content blocks that were begun.
        waiting: log-probabilities that have no event yet.
    """

    open: tuple[str, int] | None = field(default=None)
    number: int = 0
    waiting: dict[str, Any] | None = None

    def push(self, choice: dict[str, Any]) -> Iterator[Chunk]:
        """The events of a choice of a chunk."""
        delta = choice["delta"]
        self._wait(_logprobs(choice))
        if delta.get("reasoning_content"):
            yield from self._say("thinking", delta["reasoning_content"])
        if delta.get("content"):
            yield from self._say("text", delta["content"])
        for call in delta.get("tool_calls", ()):
            yield from self._call(call)
        if self.waiting is not None and self.open is not None:
            kind, index = self.open
            yield self._grow_call(index, "") if kind == "call" else self._grow(kind, "")

    def finish(self) -> Iterator[Chunk]:
        """The last events."""
        if self.waiting is not None:
            # No block was ever open.
            yield from self._say("text", "")
        yield from self._close()

    def _close(self) -> Iterator[Chunk]:
        if self.open is not None:
            kind, index = self.open
            self.open = None
            yield {"type": "tool-call-end" if kind == "call" else "content-end", "index": index}

    def _wait(self, logprobs: dict[str, Any] | None) -> None:
        if self.waiting is None or logprobs is None:
            self.waiting = self.waiting or logprobs
            return
        self.waiting = {name: value + logprobs[name] for name, value in self.waiting.items()}

    def _taken(self) -> dict[str, Any]:
        """The field with the log-probabilities that wait, which then wait no more."""
        taken, self.waiting = self.waiting, None
        return {} if taken is None else {"logprobs": taken}

    def _say(self, kind: str, text: str) -> Iterator[Chunk]:
        if self.open is None or self.open[0] != kind:
            yield from self._close()
            self.open = kind, self.number
            self.number += 1
            block = {"type": kind, kind: ""}
            yield {"type": "content-start", "index": self.open[1], "delta": {"message": {"content": block}}}
        yield self._grow(kind, text)

    def _grow(self, kind: str, text: str) -> Chunk:
        assert self.open is not None
        grown = {"message": {"content": {kind: text}}}
        return {"type": "content-delta", "index": self.open[1], "delta": grown, **self._taken()}

    def _call(self, call: dict[str, Any]) -> Iterator[Chunk]:
        function = call["function"]
        if self.open != ("call", call["index"]):
            yield from self._close()
            self.open = "call", call["index"]
            made = {"id": call.get("id"), "type": "function", "function": {"name": function["name"], "arguments": ""}}
            begun = {"message": {"tool_calls": made}}
            yield {"type": "tool-call-start", "index": call["index"], "delta": begun, **self._taken()}
        if function["arguments"]:
            yield self._grow_call(call["index"], function["arguments"])

    def _grow_call(self, index: int, arguments: str) -> Chunk:
        grown = {"message": {"tool_calls": {"function": {"arguments": arguments}}}}
        return {"type": "tool-call-delta", "index": index, "delta": grown, **self._taken()}


def _logprobs(choice: dict[str, Any]) -> dict[str, Any] | None:
    """The tokens of a chunk with their log-probabilities."""
    if not choice["logprobs"] or not choice["logprobs"]["content"]:
        return None
    entries = choice["logprobs"]["content"]
    text = "".join(entry["token"] for entry in entries)
    return {"text": text, "token_ids": choice["token_ids"], "logprobs": [entry["logprob"] for entry in entries]}


async def fold(events: AsyncIterator[Chunk]) -> dict[str, Any]:
    """Fold an answer's events into one response."""
    body: dict[str, Any] = {"id": "", "finish_reason": "", "message": {"role": "assistant", "content": []}}
    message: dict[str, Any] = body["message"]
    texts: list[str] = []
    logprobs: list[dict[str, Any]] = []
    async for event in events:
        kind, inner = event["type"], event.get("delta", {}).get("message", {})
        if "logprobs" in event:
            logprobs.append(event["logprobs"])
        if kind == "message-start":
            body["id"] = event["id"]
        elif kind == "content-start":
            message["content"].append(inner["content"])
            texts = []
        elif kind == "content-delta":
            texts += inner["content"].values()
        elif kind == "content-end":
            block = message["content"][-1]
            block[block["type"]] = "".join(texts)
        elif kind == "tool-call-start":
            message.setdefault("tool_calls", []).append(inner["tool_calls"])
            texts = []
        elif kind == "tool-call-delta":
            texts.append(inner["tool_calls"]["function"]["arguments"])
        elif kind == "tool-call-end":
            message["tool_calls"][-1]["function"]["arguments"] = "".join(texts)
        elif kind == "message-end":
            body |= event["delta"] | {name: event[name] for name in ("media", "warnings") if name in event}
    if not message["content"] and not message.get("tool_calls"):
        message["content"].append({"type": "text", "text": ""})
    return body | ({"logprobs": LongList(logprobs.__iter__)} if logprobs else {})
