"""The request schema of /v1/messages, Anthropic's API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from beheld.server import limits
from beheld.server.body_schema import Body, Name, Number, Stop, Whole, wrong
from beheld.server.parts_schema import Paged
from beheld.server.schema import Effort, Variables
from beheld.server.tools_schema import FunctionName, bounded_tools

_CACHED = {"cache_control": "Prefixes are cached by their content, without marks."}
# What blocks of answers hold that asks for nothing.
_OF_ANSWERS: dict[str, tuple[Any, ...]] = {
    "caller": ({"type": "direct"},),
    "citations": ([], {"enabled": False}),
    "toolset_name": (),
}


class Block(Body):
    """A content block."""

    says_nothing: ClassVar[Mapping[str, tuple[Any, ...]]] = _OF_ANSWERS
    without_effect: ClassVar[Mapping[str, str]] = _CACHED


class TextBlock(Block):
    """A text."""

    type: Literal["text"]
    text: str


class InlineSource(Body):
    """The bytes of an image within the request."""

    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str


class UrlSource(Body):
    """An image's address."""

    type: Literal["url"]
    url: str


class ImageBlock(Block):
    """An image."""

    type: Literal["image"]
    source: Annotated[InlineSource | UrlSource, Field(discriminator="type")]


Shown = Annotated[TextBlock | ImageBlock, Field(discriminator="type")]


class InlinePdf(Body):
    """The bytes of a PDF within the request."""

    type: Literal["base64"]
    media_type: Literal["application/pdf"]
    data: str


class PlainSource(Body):
    """A text."""

    type: Literal["text"]
    media_type: Literal["text/plain"]
    data: str


class BlocksSource(Body):
    """Texts and images that make a document."""

    type: Literal["content"]
    content: str | Annotated[list[Shown], Field(max_length=limits.MAX_PARTS, fail_fast=True)]


class DocumentBlock(Block, Paged):
    """A document with its title and context; its pages become images."""

    type: Literal["document"]
    source: Annotated[InlinePdf | UrlSource | PlainSource | BlocksSource, Field(discriminator="type")]
    title: str | None = None
    context: str | None = None


class ThinkingBlock(Block):
    """Earlier reasoning; its signature is not looked at."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class ToolUseBlock(Block):
    """An earlier call by the model; `partial_json` is what this server adds to one that was cut off."""

    without_effect: ClassVar[Mapping[str, str]] = {
        **_CACHED,
        "partial_json": "A call that was cut off is shown to the model with the arguments in `input`.",
    }

    type: Literal["tool_use"]
    id: Name
    name: Name
    input: dict[str, Any]


Found = Annotated[TextBlock | ImageBlock | DocumentBlock, Field(discriminator="type")]


class ToolResultBlock(Block):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: Name
    content: str | Annotated[list[Found], Field(max_length=limits.MAX_PARTS, fail_fast=True)] | None = None
    is_error: bool | None = None


AnyBlock = Annotated[
    TextBlock | ImageBlock | DocumentBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock,
    Field(discriminator="type"),
]
Texts = Annotated[list[TextBlock], Field(max_length=limits.MAX_PARTS, fail_fast=True)]


class Turn(Body):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[AnyBlock], Field(max_length=limits.MAX_PARTS, fail_fast=True)]


def _own_kind(given: Any) -> Any:
    """Refuse by name a tool that Anthropic's server runs, or of which it knows the schema."""
    if isinstance(given, str) and given != "custom":
        shown = given[:64].replace("{", "(").replace("}", ")")
        raise wrong(
            f"This server has none of Anthropic's own tools, and so none of the type {shown!r}",
            "Send a function of the same purpose with its input_schema, and run it in the client.",
        )
    return given


class CustomTool(Body):
    """A function that the model may call."""

    says_nothing: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "allowed_callers": (["direct"],),
        "defer_loading": (False,),
    }
    without_effect: ClassVar[Mapping[str, str]] = {
        **_CACHED,
        "eager_input_streaming": "Arguments are always streamed as they come.",
    }
    remedies: ClassVar[Mapping[str, str]] = {"input_examples": "Write them into the description."}

    type: Annotated[Literal["custom"] | None, BeforeValidator(_own_kind)] = None
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: Annotated[str, Field(max_length=1 << 16)] | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


Tools = Annotated[list[CustomTool], Field(max_length=limits.MAX_TOOLS, fail_fast=True), BeforeValidator(bounded_tools)]


class Choice(Body):
    """Whether tools are called: as the model decides, any of them, or none."""

    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool | None = None


class NamedChoice(FunctionName):
    """The one tool that must be called."""

    type: Literal["tool"]
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    """Whether the model reasons before it answers."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Whole | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Body):
    """The schema of the answer."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, populate_by_name=True)
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """The form of the answer."""

    effort: Effort | None = None
    format: OutputFormat | None = None


class CountRequest(Body):
    """POST /v1/messages/count_tokens."""

    says_nothing: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "container": (),
        "context_management": ({"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
        "ec_transfer_params": (),
        "kv_transfer_params": (),
        "mcp_servers": ([],),
        "mm_payload": (),
        "return_mm_kwargs": (False,),
        "watermarking": (False,),
    }
    without_effect: ClassVar[Mapping[str, str]] = {
        **_CACHED,
        "diagnostics": "This server has none.",
        "inference_geo": "There is one place: this server.",
        "metadata": "It changes nothing and is not stored.",
        "service_tier": "This server has one tier.",
        "speed": "This server has one speed.",
        "user_profile_id": "It changes nothing and is not stored.",
        "watermarking": "Texts are not marked.",
        "workspace_id": "It changes nothing and is not stored.",
    }

    model: Name | None = None
    messages: Annotated[list[Turn], Field(min_length=1, max_length=limits.MAX_MESSAGES, fail_fast=True)]
    system: str | Texts | None = None
    tools: Tools | None = None
    tool_choice: Annotated[Choice | NamedChoice, Field(discriminator="type")] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: Variables | None = None


class MessagesRequest(CountRequest):
    """POST /v1/messages."""

    max_tokens: Whole
    stream: bool | None = None
    stop_sequences: Stop | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Whole | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=limits.MAX_NAME)] | None = None
    grounding: bool | None = None
    vllm_xargs: Annotated[dict[str, Any], Field(max_length=limits.MAX_VARIABLES)] | None = None
