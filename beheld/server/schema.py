"""Bodies of chats, completions and tokens: every field by name; all others are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)

from beheld.core.params import SamplingParams
from beheld.server import limits
from beheld.server.body_schema import CACHED, Body, Ids, Name, Number, Stop, TokenId, Whole, wrong
from beheld.server.parts_schema import Parts, Reasoning
from beheld.server.tools_schema import AnyCall, AnyTool, Choice, bounded_tools


class Message(Body):
    """One message of a conversation."""

    without_effect: ClassVar[Mapping[str, str]] = {
        **CACHED,
        "id": "Messages are not stored.",
        "provider_specific_fields": "Templates have no place for it.",
        "reasoning_details": "`reasoning` has the text.",
        "thinking_blocks": "`reasoning` has the text.",
        "timestamp": "Templates have no place for it.",
    }
    says_nothing: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "images": ([],),
        "annotations": ([],),
        "audio": (),
        "function_call": (),
        "parsed": (),
        "partial": (False,),
        "prefix": (False,),
    }
    remedies: ClassVar[Mapping[str, str]] = {
        "audio": "Send its words as content.",
        "function_call": "Send tool_calls.",
        "images": "Send them as parts of the content.",
        "partial": "Set continue_final_message.",
        "prefix": "Set continue_final_message.",
    }
    # Agents keep notes of their own in the messages that they send back.
    foreign = "No chat template reads it here."

    role: Annotated[str, Field(max_length=64)]
    content: str | Parts | None = None
    name: Name | None = None
    tool_calls: Annotated[list[AnyCall], Field(max_length=limits.MAX_TOOLS, fail_fast=True)] | None = None
    tool_call_id: Name | None = None
    refusal: str | None = None
    reasoning_content: Reasoning | None = None
    reasoning: Reasoning | None = None


class JsonSchema(Body):
    """A named schema."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, populate_by_name=True)
    name: Name | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """The format of the answer; for structural tags see structured/structural_tag.py."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    structures: Annotated[list[dict[str, Any]], Field(max_length=limits.MAX_TOOLS, fail_fast=True)] | None = None
    triggers: Stop | None = None
    format: dict[str, Any] | None = None


class Structured(Body):
    """A grammar that the answer must follow: exactly one of the six."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, populate_by_name=True)
    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1, max_length=limits.MAX_CHOICES, fail_fast=True)] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None


class RepetitionDetection(Body):
    """When an answer ends because it repeats itself."""

    max_pattern_size: Whole = 0
    min_pattern_size: Whole = 0
    min_count: Whole = 0


class StreamOptions(Body):
    """Additional content of a stream."""

    says_nothing: ClassVar[Mapping[str, tuple[Any, ...]]] = {"include_obfuscation": (False,)}
    without_effect: ClassVar[Mapping[str, str]] = {"include_obfuscation": "Events are not padded."}

    include_usage: bool = False
    continuous_usage_stats: bool = False


# OpenAI's fields that this server lacks, with the values that ask for nothing that it lacks.
_NOTHING: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "function_call": (),
    "functions": (),
    "ec_transfer_params": (),
    "kv_transfer_params": (),
    "metadata": ({},),
    "mm_payload": (),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "prompt_cache_key": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "return_mm_kwargs": (False,),
    "return_token_offsets": (False,),
    "return_weight_versions": (False,),
    "routed_experts_prompt_start": (0,),
    "safety_identifier": (),
    "service_tier": ("auto", "default"),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "suffix": (),
    "verbosity": (),
    "vllm_xargs": ({},),
    "watermarking": (False,),
    "web_search_options": (),
}


_REMEDIES = {
    "audio": "This server generates only text; leave it out.",
    "best_of": "Ask for n answers and choose.",
    "function_call": "Use tool_choice.",
    "functions": "Use tools.",
    "modalities": "This server generates only text; leave it out.",
    "prompt_cache_key": "Cached prefixes are found by content; cache_salt separates them.",
    "safety_identifier": "Use user.",
    "store": "This server stores nothing; leave it out.",
    "spaces_between_special_tokens": "Leave it out: texts are as the tokenizer writes them.",
    "suffix": "Completions have it: /v1/completions.",
    "verbosity": "Write it in the messages.",
    "web_search_options": "Leave it out: this server searches nothing.",
}


WITHOUT_EFFECT = {
    **dict.fromkeys(("guided_decoding_backend", "guided_whitespace_pattern"), "llguidance compiles all grammars."),
    "metadata": "It changes nothing and is not stored.",
    "prediction": "It changes no answer, and answers are not computed faster with it.",
    "prompt_cache_key": "Cached prefixes are found by content; cache_salt separates them.",
    "prompt_cache_options": "Cached prefixes are found by content.",
    "prompt_cache_retention": "Cached prefixes are kept as long as there is room.",
    "request_id": "Answers have ids of this server, which X-Request-Id and its log show.",
    "safety_identifier": "It changes nothing and is not stored.",
    "service_tier": "This server has one tier.",
    "session_id": "Cached prefixes are found by content.",
    "store": "Answers of this route are not stored.",
    "stream_interval": "Each piece of an answer is sent as soon as it is there.",
    "user": "It changes nothing and is not stored.",
    "verbosity": "This server has no such switch; write it in the messages.",
    "watermarking": "Texts are not marked.",
}


class SamplingFields(Body):
    """How an answer is sampled, for every route that answers. Absent fields take the model's defaults."""

    min_tokens: Whole | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Whole | None = None
    min_p: Number | None = None
    seed: Whole | None = None
    stop: str | Stop | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=limits.MAX_STOP_IDS, fail_fast=True)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repetition_penalty: Number | None = None
    logit_bias: Annotated[dict[str, Number], Field(max_length=limits.MAX_BIASES)] | None = None
    allowed_token_ids: Annotated[Ids, Field(max_length=limits.MAX_ALLOWED_IDS)] | None = None
    bad_words: Stop | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: Whole | None = None
    truncation_side: Literal["left", "right"] | None = None
    thinking_token_budget: Whole | None = None
    repetition_detection: RepetitionDetection | None = None
    structured_outputs: Structured | None = None


# Older names of what structured_outputs has.
_GUIDED = {f"guided_{name}": name for name in ("json", "regex", "choice", "grammar")}


class Sampled(SamplingFields):
    """The common fields of chat and completions.

    Attributes:
        params_class: what the request's sampling parameters are made as.
    """

    params_class: ClassVar[type[SamplingParams]] = SamplingParams

    @model_validator(mode="before")
    @classmethod
    def _older(cls, value: Any) -> Any:
        """Put a grammar under its older name where it belongs; with both, the older name is refused as unknown."""
        if not isinstance(value, dict) or value.get("structured_outputs") is not None:
            return value
        given = {name: value[name] for name in _GUIDED if value.get(name) is not None}
        if not given:
            return value
        rest = {name: entry for name, entry in value.items() if name not in _GUIDED}
        return {**rest, "structured_outputs": {_GUIDED[name]: entry for name, entry in given.items()}}

    says_nothing: ClassVar[Mapping[str, tuple[Any, ...]]] = _NOTHING
    without_effect: ClassVar[Mapping[str, str]] = WITHOUT_EFFECT
    remedies: ClassVar[Mapping[str, str]] = _REMEDIES

    model: Name | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Whole | None = None
    max_tokens: Whole | None = None
    prompt_logprobs: Whole | None = None
    logprob_token_ids: Ids | None = None
    response_format: ResponseFormat | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=limits.MAX_NAME)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    use_beam_search: bool | None = None
    length_penalty: Number | None = None
    user: Name | None = None
    grounding: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    vllm_xargs: Annotated[dict[str, Any], Field(max_length=limits.MAX_VARIABLES)] | None = None


Messages = Annotated[list[Message], Field(min_length=1, max_length=limits.MAX_MESSAGES, fail_fast=True)]


# Variables that the server sets when it calls the template, or accepts as fields of their own.
_NOT_FOR_TEMPLATES = frozenset(
    (
        *("self", "conversation", "messages", "tools", "chat_template", "add_generation_prompt"),
        *("continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
        *("return_assistant_tokens_mask", "tokenizer_kwargs", "processor_kwargs"),
    )
)


def _variables(given: dict[str, Any]) -> dict[str, Any]:
    for name in given:
        if name in _NOT_FOR_TEMPLATES:
            raise wrong(
                f"{name!r} is not a template variable", "Leave it out; if it is a field of requests, send it as that."
            )
        if not name.isidentifier():
            raise wrong("A template variable has an invalid name", "Use letters, digits and _.")
    return given


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


Variables = Annotated[dict[str, Any], Field(max_length=limits.MAX_VARIABLES), AfterValidator(_variables)]


Tools = Annotated[list[AnyTool], Field(max_length=limits.MAX_TOOLS, fail_fast=True), BeforeValidator(bounded_tools)]


Documents = Annotated[list[dict[str, Any]], Field(max_length=limits.MAX_PARTS, fail_fast=True)]


# By modality, how its media are read.
Reading = Annotated[dict[Literal["image", "video", "audio"], dict[str, Any]], Field(max_length=3)]


class ChatRequest(Sampled):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Whole | None = None
    logprobs: bool | None = None
    top_logprobs: Whole | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | Choice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    chat_template: str | None = None
    chat_template_kwargs: Variables | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    media_io_kwargs: Reading | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: Documents | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    include_reasoning: bool | None = None
    enable_thinking: bool | None = None
    return_prompt_text: bool | None = None


def prompt_form(given: Any) -> str:
    """The form that a prompt is checked against: that of its first entry."""
    if not isinstance(given, list):
        return "text"
    first = given[0] if given else None
    return "texts" if isinstance(first, str) else "lists" if isinstance(first, list) else "ids"


Texts = Annotated[list[str], Field(max_length=limits.MAX_ANSWERS, fail_fast=True)]


Lists = Annotated[list[Ids], Field(max_length=limits.MAX_ANSWERS, fail_fast=True)]


Prompt = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[Texts, Tag("texts")]
    | Annotated[Ids, Tag("ids")]
    | Annotated[Lists, Tag("lists")],
    Discriminator(prompt_form),
]


class CompletionRequest(Sampled):
    """POST /v1/completions."""

    @model_validator(mode="before")
    @classmethod
    def _prompted(cls, value: Any) -> Any:
        """With embeddings a prompt may be left out, or null. As in a chat, `logprobs` may be false."""
        if not isinstance(value, dict):
            return value
        if value.get("logprobs") is False:
            value = {name: sent for name, sent in value.items() if name != "logprobs"}
        if value.get("prompt") is not None:
            return value
        return {**value, "prompt": "" if value.get("prompt_embeds") else []}

    prompt: Prompt
    prompt_embeds: str | Texts | None = None
    # A chat's name of max_tokens, which clients of both send.
    max_completion_tokens: Whole | None = None
    logprobs: Whole | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    suffix: str | None = None


class TokenizeRequest(Body):
    """POST /tokenize: a prompt, or a conversation with the other inputs of its template."""

    model: Name | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    messages: Messages | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Tools | None = None
    reasoning_effort: Effort | None = None
    chat_template: str | None = None
    chat_template_kwargs: Variables | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    media_io_kwargs: Reading | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: Name | None = None
    tokens: Ids
