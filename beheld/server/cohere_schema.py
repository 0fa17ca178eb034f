"""The request schema of /v2/chat, Cohere's API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field

from beheld.server import limits
from beheld.server.body_schema import Body, Name, Number, Stop, Whole, wrong
from beheld.server.parts_schema import ImagePart, TextPart, ThinkingPart
from beheld.server.schema import WITHOUT_EFFECT, Variables
from beheld.server.tools_schema import Tool, ToolCall, bounded_tools
from beheld.utils.bounded_json import exceeds

_PARTS = Field(max_length=limits.MAX_PARTS, fail_fast=True)
_BY_TYPE = Field(discriminator="type")
_Texts = Annotated[list[TextPart], _PARTS]


def _bounded_data(given: Any) -> Any:
    """A document's fields, unless they are too large to be written as JSON in one step; a text needs no writing."""
    if not isinstance(given, str) and exceeds(given, limits.MAX_REPEATED_LETTERS, limits.MAX_REPEATED_VALUES):
        words = f"more than {limits.MAX_REPEATED_LETTERS} letters or {limits.MAX_REPEATED_VALUES} values"
        raise wrong(f"The document's fields have {words}", "Send it as a text, or in several documents.")
    return given


class CohereDocument(Body):
    """A document: its fields, or one text."""

    data: Annotated[dict[str, Any] | str, BeforeValidator(_bounded_data)]
    id: Name | None = None


class CohereDocumentPart(Body):
    """A document that a tool returned."""

    type: Literal["document"]
    document: CohereDocument


class CohereUser(Body):
    """What the user says."""

    role: Literal["user"]
    content: str | Annotated[list[Annotated[TextPart | ImagePart, _BY_TYPE]], _PARTS]


class CohereSystem(Body):
    """The instructions before the conversation."""

    role: Literal["system", "developer"]
    content: str | _Texts


class CohereAssistant(Body):
    """What the model said earlier, as an answer has it."""

    without_effect: ClassVar[Mapping[str, str]] = {"citations": "Templates have no place for them."}

    role: Literal["assistant"]
    content: str | Annotated[list[Annotated[TextPart | ThinkingPart, _BY_TYPE]], _PARTS] | None = None
    tool_plan: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=limits.MAX_TOOLS, fail_fast=True)] | None = None


class CohereTool(Body):
    """What a tool returned."""

    role: Literal["tool"]
    tool_call_id: Name
    content: (
        str
        | Annotated[
            list[Annotated[TextPart | CohereDocumentPart, _BY_TYPE]],
            _PARTS,
        ]
    )


CohereMessage = Annotated[CohereUser | CohereSystem | CohereAssistant | CohereTool, Discriminator("role")]


class CohereFormat(Body):
    """The form of the answer."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, populate_by_name=True)
    type: Literal["text", "json_object"]
    json_schema: dict[str, Any] | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class CohereThinking(Body):
    """Whether the model reasons before it answers, and how long."""

    type: Literal["enabled", "disabled"]
    token_budget: Whole | None = None


class CohereChatRequest(Body):
    """POST /v2/chat."""

    says_nothing: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "kv_transfer_params": (),
        "raw_prompting": (False,),
        "return_prompt": (False,),
    }
    without_effect: ClassVar[Mapping[str, str]] = {
        "citation_options": "Answers have no citations.",
        "request_id": WITHOUT_EFFECT["request_id"],
        "safety_mode": "This server has no such switch; write it in a system message.",
        "watermarking": WITHOUT_EFFECT["watermarking"],
    }

    model: Name
    messages: Annotated[list[CohereMessage], Field(min_length=1, max_length=limits.MAX_MESSAGES, fail_fast=True)]
    stream: bool | None = None
    tools: (
        Annotated[list[Tool], Field(max_length=limits.MAX_TOOLS, fail_fast=True), BeforeValidator(bounded_tools)] | None
    ) = None
    strict_tools: bool | None = None
    tool_choice: Literal["REQUIRED", "NONE"] | None = None
    documents: Annotated[list[str | CohereDocument], _PARTS] | None = None
    response_format: CohereFormat | None = None
    max_tokens: Whole | None = None
    stop_sequences: Stop | None = None
    temperature: Number | None = None
    seed: Whole | None = None
    frequency_penalty: Number | None = None
    presence_penalty: Number | None = None
    k: Whole | None = None
    p: Number | None = None
    logprobs: bool | None = None
    thinking: CohereThinking | None = None
    chat_template_kwargs: Variables | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=limits.MAX_NAME)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
