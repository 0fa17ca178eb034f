"""Requests for responses as those of chat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from beheld.server import limits
from beheld.server.custom_tools import arguments_of, not_held
from beheld.server.errors import HttpError
from beheld.server.field_names import FieldNames
from beheld.server.notes import Notes
from beheld.server.parts_schema import Paged
from beheld.server.read import checked
from beheld.server.response_store import size_of
from beheld.server.responses_schema import (
    ENCRYPTED,
    LOGPROBS,
    MAX_TOOL_NAME,
    AllowedNames,
    CallItem,
    CustomCallItem,
    FreeformTool,
    FunctionTool,
    InputFile,
    InputImage,
    MessageItem,
    NamedFunction,
    NamespaceTool,
    OutputRefusal,
    ReasoningItem,
    ResponsesRequest,
    ResultItem,
    TextFormat,
    flat_name,
)
from beheld.server.schema import ChatRequest, SamplingFields


@dataclass(frozen=True)
class ResponseAsked:
    """A request for a response, as one of chat's.

    Attributes:
        given: the request, without its input.
        body: the same for chat.
        names: the client's names of its fields.
        history: the conversation without the instructions, as a later request goes on with it; empty if the response is
            not to be stored.
        history_bytes: its size. A long conversation is measured here, in a thread that reads it.
    """

    given: ResponsesRequest
    body: ChatRequest
    names: FieldNames
    history: list[dict[str, Any]]
    history_bytes: int


# Chat's fields of the same name and meaning.
_SAME = (
    *SamplingFields.model_fields,
    *("chat_template_kwargs", "mm_processor_kwargs", "media_io_kwargs", "vllm_xargs", "cache_salt", "priority"),
    *("include_reasoning", "parallel_tool_calls", "grounding"),
)


_NOT_KEPT = ("chat_template_kwargs", "mm_processor_kwargs", "structured_outputs", "allowed_token_ids", "logit_bias")


def asked(
    given: ResponsesRequest, earlier: Sequence[dict[str, Any]], notes: Notes, earlier_bytes: int = 0
) -> ResponseAsked:
    """The request as one of chat's; `earlier` is the conversation that it goes on with, and `earlier_bytes` its size.

    Raises:
        HttpError: there are too many messages, or a format has no schema.
    """
    if given.background:
        for name, is_wrong, value in (("store", given.store is False, "true"), ("stream", given.stream, "false")):
            if is_wrong:
                words = f"background can only be used when `{name}` is {value}: its client asks for the response later."
                raise HttpError(400, words, f"Leave {name} or background out.", param=name)
    items = _Items(earlier)
    for number, item in enumerate(given.input if isinstance(given.input, list) else ()):
        items.add(item, f"input.{number}")
    if isinstance(given.input, str):
        items.say({"role": "user", "content": given.input}, "input")
    messages, places = list(items.messages), list(items.places)
    if given.instructions:
        messages.insert(0, {"role": "system", "content": given.instructions})
        places.insert(0, ("instructions", ()))
    if len(messages) > limits.MAX_MESSAGES:
        raise HttpError(
            400, f"The conversation has more than {limits.MAX_MESSAGES} messages.", "Send fewer.", param="input"
        )
    if not messages:
        raise HttpError(400, "The input holds no message.", "Send a text or a message.", param="input")
    logprobs = LOGPROBS in (given.include or ())
    if given.top_logprobs and not logprobs:
        notes.tell("top_logprobs", f"include does not name {LOGPROBS}.")
    if ENCRYPTED in (given.include or ()):
        notes.tell("include", "Reasoning is shown as it is, and not encrypted.")
    made: dict[str, Any] = {
        "model": given.model,
        "messages": messages,
        "stream": given.stream,
        "max_tokens": given.max_output_tokens,
        "logprobs": logprobs or None,
        "top_logprobs": given.top_logprobs if logprobs else None,
        "reasoning_effort": None if given.reasoning is None else given.reasoning.effort,
        **{name: getattr(given, name) for name in _SAME},
        "response_format": _format(given.text.format) if given.text is not None else None,
    }
    if given.tools:
        made["tools"] = [{"type": "function", "function": _function(tool, notes)} for tool in _seen(given.tools)]
    choice = given.tool_choice
    named = _chosen(choice)
    if named not in (None, "auto", "none") and not given.tools and "tools" in notes.fields:
        raise HttpError(
            400,
            "tool_choice needs a tool that the model may call; web_search is left out.",
            "Send a function or a custom tool, or leave tool_choice out.",
            param="tool_choice",
        )
    # "auto" is what clients send without tools, too.
    made["tool_choice"] = None if named == "auto" and not given.tools else named
    fields = {
        "logprobs": "top_logprobs",
        "max_tokens": "max_output_tokens",
        "response_format": "text.format",
        "lora_request": "model",
    }
    if given.structured_outputs is None:
        fields["structured_outputs"] = "tools" if made["response_format"] is None else "text.format"
    names = FieldNames("input", fields=fields, places=places)
    # Kept without what is large and not repeated.
    kept = given.model_copy(update={"input": "", **dict.fromkeys(_NOT_KEPT)})
    body = checked(made, ChatRequest)
    held = {tool.name: tool.held() for tool in given.tools or () if isinstance(tool, FreeformTool)}
    for each in body.tools or ():
        each.function.hold_to(held.get(each.function.name))
    if given.store is False:
        return ResponseAsked(kept, body, names, [], 0)
    added = items.messages[len(earlier) :]
    return ResponseAsked(kept, body, names, items.messages, earlier_bytes + size_of(added))


def _chosen(choice: str | NamedFunction | AllowedNames | None) -> Any:
    """The choice as a chat has it."""
    if isinstance(choice, AllowedNames):
        tools = [_chosen(each) for each in choice.tools]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": tools}}
    if isinstance(choice, NamedFunction):
        return {"type": "function", "function": {"name": choice.name}}
    return choice


def _seen(tools: Sequence[FunctionTool | FreeformTool | NamespaceTool]) -> list[FunctionTool | FreeformTool]:
    """The tools that the model sees.

    Raises:
        HttpError: there are too many, or a name is too long.
    """
    count = sum(len(tool.tools) if isinstance(tool, NamespaceTool) else 1 for tool in tools)
    if count > limits.MAX_TOOLS:
        # Each would have a copy of its namespace's description.
        words = f"There are {count} tools; at most {limits.MAX_TOOLS} are allowed."
        raise HttpError(400, words, "Send fewer.", param="tools")
    made: list[FunctionTool | FreeformTool] = []
    for tool in tools:
        made += tool.functions() if isinstance(tool, NamespaceTool) else [tool]
    long = next((tool.name for tool in made if len(tool.name) > MAX_TOOL_NAME), None)
    if long is not None:
        words = f"The function {long[:128]!r}, with its namespace, has more than {MAX_TOOL_NAME} letters."
        raise HttpError(400, words, "Give it or its namespace a shorter name.", param="tools")
    return made


def _function(tool: FunctionTool | FreeformTool, notes: Notes) -> dict[str, Any]:
    if isinstance(tool, FunctionTool):
        return tool.model_dump(exclude={"type"}, exclude_none=True)
    if tool.format is not None and tool.format.type == "grammar" and tool.held() is None:
        words = not_held(tool.name)
        if notes.strict:
            raise HttpError(400, words, "Send the tool without a format.", param="tools")
        notes.tell("tools", words)
    return tool.as_function()


def _format(given: TextFormat | None) -> dict[str, Any] | None:
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return {"type": "json_object"}
    if given.schema_ is None:
        raise HttpError(
            400, "text.format has no schema.", "Send one, or use the type json_object.", param="text.format.schema"
        )
    return {"type": "json_schema", "json_schema": {"name": given.name, "schema": given.schema_}}


class _Items:
    """Items as chat's messages: reasoning, text and calls that follow each other are one message of the assistant.

    Args:
        earlier: the messages that the items go on with; they are not changed.
    """

    def __init__(self, earlier: Sequence[dict[str, Any]]) -> None:
        self.messages = list(earlier)
        self.places: list[tuple[str, Sequence[str]]] = [("previous_response_id", ())] * len(self.messages)
        self._own = len(self.messages)

    def add(self, item: MessageItem | CallItem | CustomCallItem | ResultItem | ReasoningItem, path: str) -> None:
        """Add an item."""
        if isinstance(item, CallItem | CustomCallItem):
            arguments = item.arguments if isinstance(item, CallItem) else arguments_of(item.input)
            namespace = item.namespace if isinstance(item, CallItem) else None
            function = {"name": flat_name(item.name, namespace), "arguments": arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            self._assistant(path).setdefault("tool_calls", []).append(call)
        elif isinstance(item, ReasoningItem):
            text = "".join(part.text for part in item.content or ())
            if text:
                message = self._assistant(path)
                message["reasoning_content"] = message.get("reasoning_content", "") + text
        elif isinstance(item, ResultItem):
            self.say(
                {"role": "tool", "tool_call_id": item.call_id, **_content(item.output)}, path, "output", item.output
            )
        elif item.role == "assistant":
            message = self._assistant(path)
            message["content"] += item.content if isinstance(item.content, str) else _text(item.content, path)
        else:
            # Templates know no developer.
            role = "system" if item.role == "developer" else item.role
            self.say({"role": role, **_content(item.content)}, path, "content", item.content)

    def say(self, message: dict[str, Any], path: str, name: str = "", given: Any = "") -> None:
        """Add a message; `name` is the field with its content, `given`."""
        self.messages.append(message)
        parts = [f"{path}.{name}.{number}" for number in range(len(given))] if isinstance(given, list) else []
        self.places.append((path, parts))

    def _assistant(self, path: str) -> dict[str, Any]:
        """The assistant's message that goes on, or a new one."""
        if len(self.messages) == self._own or self.messages[-1]["role"] != "assistant":
            self.say({"role": "assistant", "content": ""}, path)
        return self.messages[-1]


def _content(given: str | list[Any]) -> dict[str, Any]:
    if isinstance(given, str):
        return {"content": given}
    parts = [_part(part) for part in given]
    # One text alone is as good as a plain one, and templates know plain ones best.
    return {"content": parts[0]["text"] if len(parts) == 1 and "text" in parts[0] else parts or ""}


def _part(part: Any) -> dict[str, Any]:
    """One part as chat's."""
    if isinstance(part, InputImage):
        return {"type": "image_url", "image_url": {"url": part.image_url}}
    if isinstance(part, InputFile):
        given = part.model_dump(exclude_none=True, exclude={"type", "detail"})
        wanted = {name: given.pop(name) for name in Paged.model_fields if name in given}
        return {"type": "file", "file": given, **wanted}
    return {"type": "text", "text": part.refusal if isinstance(part, OutputRefusal) else part.text}


def _text(parts: list[Any], path: str) -> str:
    """The text of the assistant's parts."""
    for number, part in enumerate(parts):
        if isinstance(part, InputImage | InputFile):
            place = f"{path}.content.{number}"
            raise HttpError(400, "An assistant's message holds text only.", "Send it as the user's.", param=place)
    return "".join(part.refusal if isinstance(part, OutputRefusal) else part.text for part in parts)
