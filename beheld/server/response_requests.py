"""The request schema of /v1/responses, and its requests as those of chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Discriminator, Field, Tag, ValidationInfo

from beheld.server import limits
from beheld.server.body_schema import Body, Name, Whole, wrong
from beheld.server.custom_tools import arguments_of, function_of, held_grammar, not_held
from beheld.server.errors import HttpError
from beheld.server.field_names import FieldNames
from beheld.server.notes import Notes
from beheld.server.parts_schema import Detail, Paged
from beheld.server.response_store import size_of
from beheld.server.schema import ChatRequest, Effort, Reading, SamplingFields, StreamOptions, Variables
from beheld.server.tools_schema import bounded_tools
from beheld.utils.bounded_json import exceeds

_STATUS: dict[str, tuple[Any, ...]] = {"status": ("completed", "incomplete", "in_progress")}


class InputText(Body):
    """A text."""

    type: Literal["input_text"]
    text: str


class InputImage(Body):
    """An image by its URL."""

    remedies: ClassVar[Mapping[str, str]] = {"file_id": "Send its image_url; this server keeps no files."}

    type: Literal["input_image"]
    image_url: str
    detail: Detail | None = None


class InputFile(Paged):
    """A file: its bytes in base64 or as a data URL, or its address."""

    remedies: ClassVar[Mapping[str, str]] = {"file_id": "Send its file_data; this server keeps no files."}
    says_nothing: ClassVar[Mapping[str, tuple[Any, ...]]] = {"file_id": ()}

    type: Literal["input_file"]
    file_data: str | None = None
    file_url: str | None = None
    filename: Name | None = None
    detail: Detail | None = None


class OutputText(Body):
    """A text of an earlier answer."""

    says_nothing: ClassVar[Mapping[str, tuple[Any, ...]]] = {"annotations": ([],), "logprobs": ([],), "parsed": ()}

    type: Literal["output_text"]
    text: str


class OutputRefusal(Body):
    """A text with which the assistant refused earlier."""

    type: Literal["refusal"]
    refusal: str


AnyPart = Annotated[InputText | InputImage | InputFile | OutputText | OutputRefusal, Field(discriminator="type")]
PartList = Annotated[list[AnyPart], Field(max_length=limits.MAX_PARTS, fail_fast=True)]


class MessageItem(Body):
    """A message, or one of an earlier answer."""

    says_nothing: ClassVar[Mapping[str, tuple[Any, ...]]] = {**_STATUS, "phase": ("commentary", "final_answer")}

    type: Literal["message"] = "message"
    id: Name | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: str | PartList


class CallItem(Body):
    """An earlier call by the model."""

    says_nothing: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **_STATUS,
        "caller": (),
        "parsed_arguments": (),
    }

    type: Literal["function_call"]
    id: Name | None = None
    call_id: Name
    name: Name
    namespace: Name | None = None
    arguments: str


class CustomCallItem(Body):
    """An earlier call of a custom tool by the model."""

    says_nothing: ClassVar[Mapping[str, tuple[Any, ...]]] = {**_STATUS, "caller": (), "namespace": ()}

    type: Literal["custom_tool_call"]
    id: Name | None = None
    call_id: Name
    name: Name
    input: str


class ResultItem(Body):
    """The result of a call."""

    says_nothing: ClassVar[Mapping[str, tuple[Any, ...]]] = {**_STATUS, "caller": ()}
    without_effect: ClassVar[Mapping[str, str]] = {"name": "`call_id` says whose result it is."}

    type: Literal["function_call_output", "custom_tool_call_output"]
    id: Name | None = None
    call_id: Name
    output: str | PartList


class ReasoningText(Body):
    """A piece of earlier reasoning."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Body):
    """Earlier reasoning."""

    says_nothing: ClassVar[Mapping[str, tuple[Any, ...]]] = {**_STATUS, "encrypted_content": ("",), "summary": ([],)}

    type: Literal["reasoning"]
    id: Name | None = None
    content: Annotated[list[ReasoningText], Field(max_length=limits.MAX_PARTS, fail_fast=True)] | None = None


def _kind(item: Any) -> Any:
    """The type of an item; a message need not say it."""
    return item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", "message")


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CustomCallItem, Tag("custom_tool_call")]
    | Annotated[ResultItem, Tag("function_call_output")]
    | Annotated[ResultItem, Tag("custom_tool_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind),
]


# The letters of a name that chat takes.
_MAX_TOOL_NAME = 64


class FunctionTool(Body):
    """A function that the model may call."""

    says_nothing: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "defer_loading": (False,),
        "allowed_callers": (["direct"],),
    }

    type: Literal["function"]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: Annotated[str, Field(max_length=1 << 16)] | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class InputFormat(Body):
    """What the input of a custom tool looks like."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: Annotated[str, Field(max_length=1 << 16)] | None = None


class FreeformTool(Body):
    """A tool whose input is a text. The model sees a function with the one argument `input`."""

    says_nothing: ClassVar[Mapping[str, tuple[Any, ...]]] = {"defer_loading": (False,)}

    type: Literal["custom"]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: Annotated[str, Field(max_length=1 << 16)] | None = None
    format: InputFormat | None = None

    def as_function(self) -> dict[str, Any]:
        """The function that the model sees."""
        return function_of(self.name, self.description, self._grammar())

    def held(self) -> str | None:
        """The grammar that its calls can be held to, in Lark."""
        grammar = self._grammar()
        return None if grammar is None else held_grammar(*grammar)

    def _grammar(self) -> tuple[str, str] | None:
        if self.format is None or not self.format.definition:
            return None
        return self.format.syntax or "lark", self.format.definition


class NamespaceTool(Body):
    """Functions of one source, such as an MCP server that the client speaks with.

    The model sees each as NAMESPACE__NAME, and calls have both names apart.
    """

    says_nothing: ClassVar[Mapping[str, tuple[Any, ...]]] = {"defer_loading": (False,)}

    type: Literal["namespace"]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: Annotated[str, Field(max_length=1 << 16)] | None = None
    tools: Annotated[list[FunctionTool], Field(min_length=1, max_length=limits.MAX_TOOLS, fail_fast=True)]

    def functions(self) -> list[FunctionTool]:
        """The functions as the model sees them."""
        words = self.description or ""
        return [
            tool.model_copy(
                update={
                    "name": flat_name(tool.name, self.name),
                    "description": "\n".join(filter(None, (words, tool.description))) or None,
                }
            )
            for tool in self.tools
        ]


def flat_name(name: str, namespace: str | None) -> str:
    """The name of a function in a namespace, if there is one, as the model sees it."""
    return name if namespace is None else f"{namespace}__{name}"


AnyTool = Annotated[FunctionTool | FreeformTool | NamespaceTool, Field(discriminator="type")]
ToolList = Annotated[list[AnyTool], Field(max_length=limits.MAX_TOOLS, fail_fast=True)]


def _runnable(given: Any, info: ValidationInfo) -> Any:
    """Leave out searches, which agents offer with every request, and note it; refuse other tools that a server runs."""
    if not isinstance(given, list):
        return given
    bounded_tools(given)
    kept = []
    for tool in given:
        kind = tool.get("type") if isinstance(tool, dict) else "function"
        if not isinstance(kind, str) or kind in ("function", "custom", "namespace"):
            kept.append(tool)
        elif kind.startswith("web_search") and isinstance(info.context, Notes) and not info.context.strict:
            info.context.tell("tools", "This server searches nothing, so the model is not offered web_search.")
        else:
            shown = kind[:64].replace("{", "(").replace("}", ")")
            raise wrong(f"This server runs no tools, and so none of the type {shown!r}", _HOSTED.get(kind, _OWN))
    return kept


_OWN = "Send a function of the same purpose, and run it in the client."
_HOSTED = {
    "mcp": "Let the client speak with the MCP server: send its tools as functions, and run the calls there.",
}


class NamedFunction(Body):
    """The one function or custom tool that must be called."""

    type: Literal["function", "custom"]
    name: Name


class AllowedNames(Body):
    """Those of the functions and custom tools that may be called, and whether one must be."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Field(min_length=1, max_length=limits.MAX_TOOLS)]


def _bounded_schema(given: Any) -> Any:
    """The schema, unless it is too large for answers that repeat it."""
    if exceeds(given, limits.MAX_REPEATED_LETTERS, limits.MAX_REPEATED_VALUES):
        words = f"more than {limits.MAX_REPEATED_LETTERS} letters or {limits.MAX_REPEATED_VALUES} values"
        raise wrong(f"The schema has {words}", "Send a smaller one.")
    return given


class TextFormat(Body):
    """The format of the answer."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, populate_by_name=True)
    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    description: Annotated[str, Field(max_length=1 << 16)] | None = None
    schema_: Annotated[dict[str, Any] | None, BeforeValidator(_bounded_schema)] = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Body):
    """Options of the answer's text."""

    without_effect: ClassVar[Mapping[str, str]] = {"verbosity": "This server has no such switch."}

    format: TextFormat | None = None


class ReasoningOptions(Body):
    """Options of the reasoning."""

    without_effect: ClassVar[Mapping[str, str]] = {
        "summary": "Reasoning is shown as it is.",
        "generate_summary": "Reasoning is shown as it is.",
    }

    effort: Effort | None = None


# What `include` may name: log-probabilities of the answer's text, and reasoning, which is shown anyway.
_LOGPROBS, _ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"


def _known(given: list[str]) -> list[str]:
    for name in given:
        if name not in (_LOGPROBS, _ENCRYPTED):
            raise wrong(f"{name[:64]!r} cannot be included", "Leave it out.")
    return given


Metadata = Annotated[
    dict[Name, Annotated[str, Field(max_length=limits.MAX_METADATA_LETTERS)]], Field(max_length=limits.MAX_METADATA)
]


class ResponsesRequest(SamplingFields):
    """POST /v1/responses."""

    says_nothing: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "access_programs": (),
        "background_options": ({},),
        "context_management": ([],),
        "conversation": (),
        "ec_transfer_params": (),
        "enable_response_messages": (False,),
        "image": ({},),
        "kv_transfer_params": (),
        "max_tool_calls": (),
        "mm_payload": (),
        "moderation": (),
        "previous_input_messages": (),
        "prompt": (),
        "return_mm_kwargs": (False,),
        "spaces_between_special_tokens": (True,),
        "truncation": ("disabled",),
        "watermarking": (False,),
    }
    without_effect: ClassVar[Mapping[str, str]] = {
        "client_metadata": "It changes nothing and is not stored.",
        "max_tool_calls": "It counts calls of tools that a server runs, and this one runs none.",
        "prompt_cache_key": "Cached prefixes are found by content.",
        "prompt_cache_options": "Cached prefixes are found by content.",
        "prompt_cache_retention": "Cached prefixes are kept as long as there is room.",
        "request_id": "Answers have ids of this server, which X-Request-Id and its log show.",
        "session_id": "Cached prefixes are found by content.",
        "safety_identifier": "It changes nothing and is not stored.",
        "service_tier": "This server has one tier.",
        "user": "It changes nothing and is not stored.",
        "watermarking": "Texts are not marked.",
    }
    remedies: ClassVar[Mapping[str, str]] = {
        "conversation": "Use previous_response_id.",
        "max_tokens": "Use max_output_tokens.",
        "messages": "Use input.",
        "previous_input_messages": "Use input, or previous_response_id.",
        "response_format": "Use text.format.",
        "truncation": "Send a shorter conversation.",
    }

    model: Name | None = None
    input: str | Annotated[list[Item], Field(min_length=1, max_length=limits.MAX_MESSAGES, fail_fast=True)]
    instructions: Annotated[str, Field(max_length=limits.MAX_REPEATED_LETTERS)] | None = None
    previous_response_id: Name | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_output_tokens: Whole | None = None
    tools: Annotated[ToolList, BeforeValidator(_runnable)] | None = None
    tool_choice: (
        Literal["none", "auto", "required"]
        | Annotated[NamedFunction | AllowedNames, Field(discriminator="type")]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    top_logprobs: Whole | None = None
    include: Annotated[list[Name], Field(max_length=64), AfterValidator(_known)] | None = None
    metadata: Metadata | None = None
    chat_template_kwargs: Variables | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    media_io_kwargs: Reading | None = None
    vllm_xargs: Annotated[dict[str, Any], Field(max_length=limits.MAX_VARIABLES)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=limits.MAX_NAME)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    include_reasoning: bool | None = None
    grounding: bool | None = None


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
    logprobs = _LOGPROBS in (given.include or ())
    if given.top_logprobs and not logprobs:
        notes.tell("top_logprobs", f"include does not name {_LOGPROBS}.")
    if _ENCRYPTED in (given.include or ()):
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
    body = ChatRequest.model_validate(made)
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
    long = next((tool.name for tool in made if len(tool.name) > _MAX_TOOL_NAME), None)
    if long is not None:
        words = f"The function {long[:128]!r}, with its namespace, has more than {_MAX_TOOL_NAME} letters."
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
