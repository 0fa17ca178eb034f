"""The request schema of /v1/responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Discriminator, Field, Tag, ValidationInfo

from beheld.server import limits
from beheld.server.body_schema import Body, Name, Whole, wrong
from beheld.server.custom_tools import function_of, held_grammar
from beheld.server.notes import Notes
from beheld.server.parts_schema import Detail, Paged
from beheld.server.schema import Effort, Reading, SamplingFields, StreamOptions, Variables
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
MAX_TOOL_NAME = 64


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
LOGPROBS, ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"


def _known(given: list[str]) -> list[str]:
    for name in given:
        if name not in (LOGPROBS, ENCRYPTED):
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
    enable_response_messages: bool | None = None
