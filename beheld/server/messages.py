"""POST /v1/messages: Anthropic's API over the chat route's chunks."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from beheld.core.outputs import RequestOutput
from beheld.server import limits
from beheld.server.chat import ChunkHead
from beheld.server.errors import HttpError
from beheld.server.field_names import FieldNames
from beheld.server.messages_schema import (
    BlocksSource,
    CountRequest,
    DocumentBlock,
    ImageBlock,
    InlinePdf,
    InlineSource,
    MessagesRequest,
    NamedChoice,
    PlainSource,
    TextBlock,
    Thinking,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
)
from beheld.server.notes import Notes
from beheld.server.parts_schema import Paged
from beheld.server.read import checked
from beheld.server.schema import ChatRequest
from beheld.server.stream import Chunk

# The template variable of models whose reasoning can be switched.
SWITCH = "enable_thinking"
_REASONS = {"stop": "end_turn", "tool_calls": "tool_use", "abort": "pause_turn", "repetition": "end_turn"}


@dataclass(frozen=True)
class Asked:
    """A request of another API as one of chat's.

    Attributes:
        body: the request.
        names: the client's names of its fields.
        shows_reasoning: the answer holds the reasoning.
    """

    body: ChatRequest
    names: FieldNames
    shows_reasoning: bool = True


def asked(given: CountRequest, notes: Notes, *, switch: bool, reasons: bool, bounded: bool = False) -> Asked:
    """The request as one of chat's.

    Args:
        given: the request.
        notes: gets what has no effect here.
        switch: the model's template can switch reasoning.
        reasons: the server separates reasoning from the answer.
        bounded: the server can end reasoning.

    Raises:
        HttpError: fields contradict each other.
    """
    turns = _Conversation(notes)
    turns.system(given.system)
    for number, turn in enumerate(given.messages):
        turns.add(turn, number)
    if len(turns.messages) > limits.MAX_MESSAGES:
        raise HttpError(
            400,
            f"The conversation has more than {limits.MAX_MESSAGES} messages and tool results.",
            "Send fewer.",
            param="messages",
        )
    made: dict[str, Any] = {"model": given.model, "messages": turns.messages}
    # An assistant's last message is the beginning of the answer.
    made["continue_final_message"] = turns.messages[-1]["role"] == "assistant" or None
    if given.tools:
        made["tools"] = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.input_schema,
                    "strict": tool.strict,
                },
            }
            for tool in given.tools
        ]
    made |= _choice(given) | _thinking(given.thinking, notes, switch=switch, reasons=reasons)
    budget = None if given.thinking is None else given.thinking.budget_tokens
    if budget is not None and bounded:
        made["thinking_token_budget"] = budget
    elif budget is not None:
        notes.tell("thinking.budget_tokens", "Reasoning has no bound of its own; max_tokens bounds it with the answer.")
    if given.chat_template_kwargs:
        made["chat_template_kwargs"] = {**made.get("chat_template_kwargs", {}), **given.chat_template_kwargs}
    if given.output_config is not None:
        made["reasoning_effort"] = given.output_config.effort
    if given.output_config is not None and given.output_config.format is not None:
        schema = {"schema": given.output_config.format.schema_}
        made["response_format"] = {"type": "json_schema", "json_schema": schema}
    if isinstance(given, MessagesRequest):
        same = ("max_tokens", "stream", "temperature", "top_p", "top_k", "cache_salt", "grounding", "vllm_xargs")
        made |= {name: getattr(given, name) for name in same}
        made["stop"] = given.stop_sequences
    formed = "response_format" in made
    names = FieldNames(
        "messages",
        fields={
            "structured_outputs": "output_config.format" if formed else "tools",
            "stop": "stop_sequences",
            "lora_request": "model",
        },
        places=turns.places,
    )
    shown = given.thinking is None or given.thinking.display != "omitted"
    # The parts of documents and thinking may make it larger than a request may be.
    return Asked(checked(made, ChatRequest), names, shown)


def _choice(given: CountRequest) -> dict[str, Any]:
    choice = given.tool_choice
    if choice is None:
        return {}
    parallel = False if choice.disable_parallel_tool_use else None
    if isinstance(choice, NamedChoice):
        named = {"type": "function", "function": {"name": choice.name}}
        return {"tool_choice": named, "parallel_tool_calls": parallel}
    word = "required" if choice.type == "any" else choice.type
    return {"tool_choice": word, "parallel_tool_calls": parallel}


def _thinking(given: Thinking | None, notes: Notes, *, switch: bool, reasons: bool) -> dict[str, Any]:
    if given is None:
        return {}
    wanted = given.type != "disabled"
    if switch:
        return {"chat_template_kwargs": {SWITCH: wanted}}
    if wanted or reasons:
        notes.tell("thinking", "This model's template has no switch for reasoning: it reasons as it was trained to.")
    return {}


class _Conversation:
    """The messages as chat takes them, and where each came from (see `FieldNames.places`)."""

    def __init__(self, notes: Notes) -> None:
        self.messages: list[dict[str, Any]] = []
        self.places: list[tuple[str, list[str]]] = []
        self._notes = notes

    def system(self, given: str | list[TextBlock] | None) -> None:
        """Begin with the system's text."""
        if given:
            self._say("system", given, "system", "system")

    def add(self, turn: Turn, number: int) -> None:
        """Add a message; every tool result in it becomes a message of its own."""
        path = f"messages.{number}"
        if isinstance(turn.content, str):
            self._say(turn.role, turn.content, path, path)
        elif turn.role == "assistant":
            self._answered(turn.content, path)
        else:
            self._blocks(turn.role, turn.content, path)

    def _blocks(self, role: str, blocks: list[Any], path: str) -> None:
        said: list[tuple[TextBlock | ImageBlock | DocumentBlock, str]] = []
        for number, block in enumerate(blocks):
            place = f"{path}.content.{number}"
            if isinstance(block, TextBlock | ImageBlock | DocumentBlock):
                said.append((block, place))
            elif isinstance(block, ToolResultBlock) and role == "user":
                self._parts(role, said, path)
                said = []
                if block.is_error:
                    self._notes.tell("is_error", "Templates have no such mark; the model sees the result's content.")
                more = {"tool_call_id": block.tool_use_id}
                self._say("tool", block.content or "", place, f"{place}.content", more)
            else:
                raise _misplaced(block.type, role, place)
        if said or not blocks:
            self._parts(role, said, path, always=True)

    def _answered(self, blocks: list[Any], path: str) -> None:
        """Add what the assistant said: one message with its text, reasoning and calls."""
        made: dict[str, Any] = {"role": "assistant", "content": ""}
        for number, block in enumerate(blocks):
            if isinstance(block, TextBlock):
                made["content"] += block.text
            elif isinstance(block, ThinkingBlock):
                made["reasoning_content"] = made.get("reasoning_content", "") + block.thinking
            elif isinstance(block, ToolUseBlock):
                function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
                made.setdefault("tool_calls", []).append({"id": block.id, "type": "function", "function": function})
            else:
                raise _misplaced(block.type, "assistant", f"{path}.content.{number}")
        self.messages.append(made)
        self.places.append((path, []))

    def _say(
        self, role: str, given: str | list[Any], path: str, inside: str, more: dict[str, Any] | None = None
    ) -> None:
        if isinstance(given, str):
            self.messages.append({"role": role, "content": given, **(more or {})})
            self.places.append((path, []))
        else:
            self._parts(role, [(block, f"{inside}.{k}") for k, block in enumerate(given)], path, more, always=True)

    def _parts(
        self,
        role: str,
        said: list[tuple[Any, str]],
        path: str,
        more: dict[str, Any] | None = None,
        *,
        always: bool = False,
    ) -> None:
        if said or always:
            parts, places = [], []
            for block, place in said:
                made = _document(block, place) if isinstance(block, DocumentBlock) else [_part(block)]
                parts += made
                places += [place] * len(made)
            # One text alone is as good as a plain one, and templates know plain ones best.
            plain = parts[0]["text"] if len(parts) == 1 and "text" in parts[0] else parts or ""
            self.messages.append({"role": role, "content": plain, **(more or {})})
            self.places.append((path, places))


def _part(block: TextBlock | ImageBlock) -> dict[str, Any]:
    if isinstance(block, TextBlock):
        return {"type": "text", "text": block.text}
    source = block.source
    if isinstance(source, InlineSource):
        return {"type": "image_url", "image_url": {"url": f"data:{source.media_type};base64,{source.data}"}}
    return {"type": "image_url", "image_url": {"url": source.url}}


def _document(block: DocumentBlock, place: str) -> list[dict[str, Any]]:
    """A document's title and context, and the document, as parts.

    Raises:
        HttpError: pages are chosen of what has none.
    """
    said = [text for text in (block.title, block.context) if text]
    parts: list[dict[str, Any]] = [{"type": "text", "text": "\n".join(said)}] if said else []
    source = block.source
    wanted = block.model_dump(include=set(Paged.model_fields), exclude_none=True)
    if wanted and isinstance(source, PlainSource | BlocksSource):
        name = next(iter(wanted))
        raise HttpError(
            400,
            f"{name} needs a document with pages; a source of the type {source.type!r} has none.",
            "Leave it out.",
            param=f"{place}.{name}",
        )
    if isinstance(source, PlainSource):
        return [*parts, {"type": "text", "text": source.data}]
    if isinstance(source, BlocksSource):
        inner = source.content
        return [*parts, *([{"type": "text", "text": inner}] if isinstance(inner, str) else map(_part, inner))]
    if isinstance(source, InlinePdf):
        file = {"file_data": f"data:{source.media_type};base64,{source.data}"}
    else:
        file = {"file_url": source.url}
    return [*parts, {"type": "file", "file": file, **wanted}]


def _misplaced(kind: str, role: str, place: str) -> HttpError:
    return HttpError(
        400, f"A {kind} block cannot stand in a message of the role {role!r}.", "Move it, or leave it out.", param=place
    )


# ---------------------------------------------------------------------- answers


@dataclass
class Prompted:
    """What is known of the prompt when the answer begins.

    Attributes:
        tokens: its length.
        cached: how many of them were cached.
    """

    tokens: int = 0
    cached: int = 0

    def begun(self, output: RequestOutput) -> None:
        """Take the counts of a request's first output."""
        self.tokens, self.cached = output.usage.prompt_tokens, output.num_cached_tokens

    def usage(self, answered: int) -> dict[str, Any]:
        """Anthropic's usage object: its input_tokens are those that were not cached."""
        return {
            "input_tokens": self.tokens - self.cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self.cached,
            "output_tokens": answered,
        }


async def events(
    chunks: AsyncGenerator[Chunk, None], ask: Asked, head: ChunkHead, prompted: Prompted, notes: Notes
) -> AsyncGenerator[Chunk, None]:
    """The events of an answer, made of chat's chunks."""
    blocks = _Blocks(shows_reasoning=ask.shows_reasoning)
    begun = False
    reason, stop, answered = None, None, 0
    more: dict[str, Any] = {}
    async with contextlib.aclosing(chunks):
        async for chunk in chunks:
            if not begun:
                begun = True
                yield {"type": "message_start", "message": _message(head, prompted, notes, chunk.get("media"))}
                yield {"type": "ping"}
            elif chunk.get("media"):
                more["media"] = chunk["media"]
            for choice in chunk["choices"]:
                for event in blocks.push(choice["delta"]):
                    yield event
                if choice["finish_reason"] is not None:
                    reason, stop = choice["finish_reason"], choice["stop_reason"]
                    more |= {"grounding": choice["grounding"]} if "grounding" in choice else {}
            answered = chunk.get("usage", {}).get("completion_tokens", answered)
    for event in blocks.close():
        yield event
    stopped = reason == "stop" and isinstance(stop, str)
    if reason == "length":
        whole = answered < (ask.body.max_tokens or 0)
        shown = "model_context_window_exceeded" if whole else "max_tokens"
    else:
        shown = "stop_sequence" if stopped else _REASONS[reason or "stop"]
    delta = {"stop_reason": shown, "stop_sequence": stop if stopped else None}
    yield {"type": "message_delta", "delta": delta, "usage": prompted.usage(answered), **more}
    yield {"type": "message_stop"}


def _message(head: ChunkHead, prompted: Prompted, notes: Notes, media: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        "id": head.id,
        "type": "message",
        "role": "assistant",
        "model": head.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": prompted.usage(0),
    }
    more = {"media": media, "warnings": notes.warnings()}
    return made | {name: value for name, value in more.items() if value}


@dataclass
class _Blocks:
    """Turns chat's deltas into the events of content blocks.

    Attributes:
        shows_reasoning: reasoning becomes blocks.
        number: blocks that were begun.
        open: the kind of the open block, and the index of its call; None if none is open.
    """

    shows_reasoning: bool
    number: int = 0
    open: tuple[str, int] | None = field(default=None)

    def push(self, delta: dict[str, Any]) -> Iterator[Chunk]:
        """The events of a delta."""
        if delta.get("reasoning_content") and self.shows_reasoning:
            yield from self._begin(("thinking", 0), {"type": "thinking", "thinking": "", "signature": ""})
            yield self._grow({"type": "thinking_delta", "thinking": delta["reasoning_content"]})
        if delta.get("content"):
            yield from self._begin(("text", 0), {"type": "text", "text": ""})
            yield self._grow({"type": "text_delta", "text": delta["content"]})
        for call in delta.get("tool_calls", ()):
            made = {"type": "tool_use", "id": call.get("id"), "name": call["function"].get("name"), "input": {}}
            yield from self._begin(("tool_use", call["index"]), made)
            if call["function"]["arguments"]:
                yield self._grow({"type": "input_json_delta", "partial_json": call["function"]["arguments"]})

    def close(self) -> Iterable[Chunk]:
        """The end of the open block."""
        if self.open is not None:
            self.open = None
            yield {"type": "content_block_stop", "index": self.number - 1}

    def _begin(self, kind: tuple[str, int], block: dict[str, Any]) -> Iterator[Chunk]:
        if self.open != kind:
            yield from self.close()
            yield {"type": "content_block_start", "index": self.number, "content_block": block}
            self.open = kind
            self.number += 1

    def _grow(self, delta: dict[str, Any]) -> Chunk:
        return {"type": "content_block_delta", "index": self.number - 1, "delta": delta}


async def fold(events: AsyncIterator[Chunk]) -> dict[str, Any]:
    """Fold an answer's events into one message."""
    message: dict[str, Any] = {}
    texts: list[str] = []
    async for event in events:
        kind = event["type"]
        if kind == "message_start":
            message = event["message"]
        elif kind == "content_block_start":
            message["content"].append(event["content_block"])
            texts = []
        elif kind == "content_block_delta":
            texts += [value for name, value in event["delta"].items() if name != "type"]
        elif kind == "content_block_stop":
            _complete(message["content"][-1], "".join(texts))
        elif kind == "message_delta":
            message |= event["delta"] | {name: value for name, value in event.items() if name not in ("type", "delta")}
    return message


def _complete(block: dict[str, Any], text: str) -> None:
    if block["type"] != "tool_use":
        block[block["type"]] = text
        return
    try:
        found = json.loads(text or "{}")
    except ValueError:
        found = None
    if isinstance(found, dict):
        block["input"] = found
    else:
        # The answer was cut off within the arguments, which have no place in `input`.
        block["partial_json"] = text
