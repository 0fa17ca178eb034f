"""What requests may say: every field by name, everything else refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Number = Annotated[float, Field(allow_inf_nan=False)]
Whole = Annotated[int, Field(ge=-(2**63), lt=2**64)]
Name = Annotated[str, Field(max_length=512)]
Stop = Annotated[list[Annotated[str, Field(max_length=4096)]], Field(max_length=64)]


class Body(BaseModel):
    """Types are taken as they are: no number from a text or from a boolean."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


# ---------------------------------------------------------------------- messages


class TextPart(Body):
    """Words."""

    type: Literal["text"]
    text: str


class ImageUrl(Body):
    """A picture's address. Pictures are always seen in the model's full resolution, so "low" is not to be had."""

    url: str
    detail: Literal["auto", "high"] | None = None
    uuid: Name | None = None


class MediaUrl(Body):
    """An address."""

    url: str
    uuid: Name | None = None


class ImagePart(Body):
    """A picture."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)
    type: Literal["image_url"]
    image_url: ImageUrl | str
    uuid: Name | None = None


class VideoPart(Body):
    """A video."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)
    type: Literal["video_url"]
    video_url: MediaUrl | str
    uuid: Name | None = None


class AudioPart(Body):
    """A sound by its address."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)
    type: Literal["audio_url"]
    audio_url: MediaUrl | str
    uuid: Name | None = None


class InputAudio(Body):
    """A sound's bytes."""

    data: str
    format: Name | None = None


class InputAudioPart(Body):
    """A sound within the request."""

    type: Literal["input_audio"]
    input_audio: InputAudio
    uuid: Name | None = None


class EmbedsPart(Body):
    """A picture's embeddings, made elsewhere."""

    type: Literal["image_embeds"]
    image_embeds: str | dict[str, str]
    uuid: Name | None = None


Part = Annotated[
    TextPart | ImagePart | VideoPart | AudioPart | InputAudioPart | EmbedsPart, Field(discriminator="type")
]


class CalledFunction(Body):
    """The function of a call: its arguments are JSON in a text."""

    name: Name
    arguments: str


class ToolCall(Body):
    """A call that the model made before."""

    id: Name | None = None
    type: Literal["function"] = "function"
    index: int | None = None
    function: CalledFunction


class Message(Body):
    """One message of a conversation."""

    role: Annotated[str, Field(max_length=64)]
    content: str | list[Part] | None = None
    name: Name | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: Name | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


# ---------------------------------------------------------------------- tools and formats


class Function(Body):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: Annotated[str, Field(max_length=1 << 16)] | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: Function


class FunctionName(Body):
    """A function by its name."""

    name: Name


class ToolChoice(Body):
    """The one function that must be called."""

    type: Literal["function"]
    function: FunctionName


class JsonSchema(Body):
    """A schema under a name."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, populate_by_name=True)
    name: Name | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Structured(Body):
    """A grammar that the answer must follow: exactly one of the four."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, populate_by_name=True)
    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1, max_length=1000)] | None = None
    grammar: str | None = None


class StreamOptions(Body):
    """What a stream says beside the answer."""

    include_usage: bool = False


# ---------------------------------------------------------------------- requests


class Sampled(Body):
    """What chat and completions have in common. Absent fields take the model's own defaults."""

    model: Name | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Whole | None = None
    max_tokens: Whole | None = None
    min_tokens: Whole | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Whole | None = None
    min_p: Number | None = None
    seed: Whole | None = None
    stop: str | Stop | None = None
    stop_token_ids: Annotated[list[Whole], Field(max_length=1024)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repetition_penalty: Number | None = None
    logit_bias: Annotated[dict[str, Number], Field(max_length=4096)] | None = None
    allowed_token_ids: list[Whole] | None = None
    bad_words: Stop | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Whole | None = None
    truncate_prompt_tokens: Whole | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: Structured | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    user: Name | None = None


class ChatRequest(Sampled):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    max_completion_tokens: Whole | None = None
    logprobs: bool | None = None
    top_logprobs: Whole | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


Ids = list[Whole]


class CompletionRequest(Sampled):
    """POST /v1/completions."""

    prompt: str | list[str] | Ids | list[Ids]
    logprobs: Whole | None = None
    echo: bool | None = None


class EmbeddingRequest(Body):
    """POST /v1/embeddings: vectors of texts, or of a conversation."""

    model: Name | None = None
    input: str | Annotated[list[str], Field(min_length=1)] | Ids | list[Ids] | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=2**20)] | None = None
    truncate_prompt_tokens: Whole | None = None
    user: Name | None = None


class TokenizeRequest(Body):
    """POST /tokenize: a prompt, or a conversation."""

    model: Name | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: Name | None = None
    tokens: Ids
