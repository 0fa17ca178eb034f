"""The request schema: every field by name; all others are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PrivateAttr,
    Tag,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from beheld.core.params import nearest
from beheld.server import limits
from beheld.server.custom_tools import arguments_of, function_of, held_grammar, not_held
from beheld.server.notes import Notes
from beheld.utils.bounded_json import exceeds

Number = Annotated[float, Field(allow_inf_nan=False)]
Whole = Annotated[int, Field(ge=-(2**63), lt=2**64)]
# Lists stop at their first error: a list with a hundred thousand wrong entries gives one error.
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
# Token ids that are checked in one step, which keeps the interpreter lock: half a million would keep it for 17 ms.
_IDS_A_STEP = 16_384


def _in_steps(given: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """`check` a long list in steps between which other threads run."""
    if not isinstance(given, list) or len(given) <= _IDS_A_STEP:
        return check(given)
    checked: list[int] = []
    for start in range(0, len(given), _IDS_A_STEP):
        try:
            checked += check(given[start : start + _IDS_A_STEP])
        except ValidationError:
            # Once more from the beginning, so that the error names the entry's place in the whole list.
            return check(given)
    return checked


Ids = Annotated[list[TokenId], Field(fail_fast=True), WrapValidator(_in_steps)]
Name = Annotated[str, Field(max_length=limits.MAX_NAME)]
_StopText = Annotated[str, Field(max_length=limits.MAX_STOP_LENGTH)]
Stop = Annotated[list[_StopText], Field(max_length=limits.MAX_STOPS, fail_fast=True)]


class Body(BaseModel):
    """A request body or a part of one. Types are strict: no number from a text or a boolean.

    A field that OpenAI has and this server lacks is accepted if it asks for nothing: null, or a value that holds here
    anyway (`says_nothing`). So a client can send back the objects that it received. A field that cannot change an
    answer here is accepted with any value and noted (`without_effect`), unless the operator wants it refused; the
    validation's context holds the notes.

    What checks a body is made when the first one is checked, or by `model_rebuild`: each class takes milliseconds, and
    parts of a body need none of their own.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, defer_build=True)

    says_nothing: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    without_effect: ClassVar[Mapping[str, str]] = {}
    remedies: ClassVar[Mapping[str, str]] = {}
    # The words about a field that nobody knows, if such are accepted: those without a remedy, and near no known name.
    foreign: ClassVar[str] = ""

    @model_validator(mode="before")
    @classmethod
    def _known(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse the first unknown field by name, before other checks; drop the fields that ask for nothing."""
        if not isinstance(value, dict):
            return value
        allows = cls.model_config.get("extra") == "allow"
        known = {field.alias or name for name, field in cls.model_fields.items()}
        notes = info.context if isinstance(info.context, Notes) else Notes()
        silent = set()
        for name, sent in value.items():
            if name in known:
                if name in cls.without_effect and sent is not None and not notes.strict:
                    notes.tell(name, cls.without_effect[name])
                continue
            if name in cls.says_nothing and any(sent is one or sent == one for one in (None, *cls.says_nothing[name])):
                silent.add(name)
                continue
            if name in cls.without_effect and not notes.strict:
                notes.tell(name, cls.without_effect[name])
                silent.add(name)
                continue
            if allows:
                continue
            if cls.foreign and notes.fields.get(name) == cls.foreign:
                silent.add(name)
                continue
            remedy = cls.remedies.get(name) or nearest(name, known, 0.8 if cls.foreign else 0.6)
            if cls.foreign and not remedy and not notes.strict and len(notes.fields) < limits.MAX_NOTES:
                notes.tell(name[:64], cls.foreign)
                silent.add(name)
                continue
            remedy = remedy or "Leave it out."
            # Braces would be taken for format fields.
            shown = repr(name[:64]).replace("{", "(").replace("}", ")")
            raise PydanticCustomError(
                "unknown_field", f"The field {shown} is unknown.", {"name": name[:64], "remedy": remedy}
            )
        return {name: sent for name, sent in value.items() if name not in silent} if silent else value


def wrong(reason: str, remedy: str) -> PydanticCustomError:
    """A validation error with what to do about it."""
    return PydanticCustomError("invalid_value", reason, {"remedy": remedy})


_CACHED = {
    "cache_control": "Prefixes are cached by their content, without marks.",
    "prompt_cache_breakpoint": "Prefixes are cached by their content, without marks.",
}

# ---------------------------------------------------------------------- messages


class TextPart(Body):
    """A text."""

    without_effect = _CACHED

    type: Literal["text", "input_text", "output_text"]
    text: str


class RefusalPart(Body):
    """A text with which the assistant refused earlier."""

    type: Literal["refusal"]
    refusal: str


def _seen_in_full(detail: str, info: ValidationInfo) -> str:
    if detail == "low":
        if isinstance(info.context, Notes) and info.context.strict:
            raise wrong(
                "Images are always processed in the model's own resolution", "Send 'auto' or 'high', or leave it out."
            )
        if isinstance(info.context, Notes):
            info.context.tell("detail", "Images are always processed in the model's own resolution.")
    return detail


Detail = Annotated[Literal["auto", "high", "low", "original"], AfterValidator(_seen_in_full)]


Pages = Annotated[str, Field(max_length=limits.MAX_NAME)] | Annotated[int, Field(ge=1, lt=2**31)]


class Paged(Body):
    """What of a document is wanted: see the how-to page on documents."""

    pages: Pages | None = None
    dpi: Number | None = None
    text_layer: bool | Literal["only"] | None = None


class ImageUrl(Body):
    """An image's URL. The model always sees its full resolution, so `detail` has no effect."""

    url: str
    detail: Detail | None = None
    uuid: Name | None = None


class MediaUrl(Body):
    """A URL."""

    url: str
    uuid: Name | None = None


class ThinkingPart(Body):
    """A text that the assistant reasoned earlier."""

    without_effect: ClassVar[Mapping[str, str]] = {"closed": "Templates close it.", "signature": "Nothing is signed."}

    type: Literal["thinking"]
    thinking: str


class ImagePart(Paged):
    """An image, or a document whose pages are images."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)
    without_effect: ClassVar[Mapping[str, str]] = _CACHED
    type: Literal["image_url"]
    image_url: ImageUrl | str
    uuid: Name | None = None


class _Sources(Body):
    """Where an item may stand in a part that is named after its modality, as in transformers' messages."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)
    without_effect: ClassVar[Mapping[str, str]] = _CACHED
    url: str | None = None
    path: str | None = None
    base64: str | None = None
    data: str | None = None
    uuid: Name | None = None


class NamedImagePart(_Sources):
    """An image in a part of the type `image`; `image_pil`, which holds an object in Python, holds a URL."""

    type: Literal["image", "image_pil"]
    image: ImageUrl | str | None = None
    image_pil: str | None = None
    detail: Detail | None = None


class NamedVideoPart(_Sources):
    """A video in a part of the type `video`."""

    type: Literal["video"]
    video: MediaUrl | str | None = None


class NamedAudioPart(_Sources):
    """Audio in a part of the type `audio`."""

    type: Literal["audio"]
    audio: MediaUrl | str | None = None


class InputImagePart(Paged):
    """An image as in the Responses API."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)
    without_effect: ClassVar[Mapping[str, str]] = _CACHED
    type: Literal["input_image"]
    image_url: ImageUrl | str
    detail: Detail | None = None
    uuid: Name | None = None


class InputVideoPart(Body):
    """A video, named as an image of the Responses API is."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)
    without_effect: ClassVar[Mapping[str, str]] = _CACHED
    type: Literal["input_video"]
    video_url: MediaUrl | str
    uuid: Name | None = None


class FileContent(Body):
    """A file: its bytes in base64 or as a data URL, or its address."""

    remedies: ClassVar[Mapping[str, str]] = {"file_id": "Send its file_data; this server keeps no files."}
    says_nothing: ClassVar[Mapping[str, tuple[Any, ...]]] = {"file_id": ()}

    file_data: str | None = None
    file_url: str | None = None
    filename: Name | None = None


class FilePart(Paged):
    """A document, or media of any kind that the model takes."""

    without_effect = _CACHED

    type: Literal["file"]
    file: FileContent
    uuid: Name | None = None


class InputFilePart(Paged):
    """A file as in the Responses API."""

    remedies: ClassVar[Mapping[str, str]] = FileContent.remedies
    says_nothing: ClassVar[Mapping[str, tuple[Any, ...]]] = FileContent.says_nothing
    without_effect = _CACHED

    type: Literal["input_file"]
    file_data: str | None = None
    file_url: str | None = None
    filename: Name | None = None
    uuid: Name | None = None


class VideoPart(Body):
    """A video."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)
    without_effect: ClassVar[Mapping[str, str]] = _CACHED
    type: Literal["video_url"]
    video_url: MediaUrl | str
    uuid: Name | None = None


class AudioPart(Body):
    """Audio by its URL."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)
    without_effect: ClassVar[Mapping[str, str]] = _CACHED
    type: Literal["audio_url"]
    audio_url: MediaUrl | str
    uuid: Name | None = None


class InputAudio(Body):
    """The bytes of an audio clip."""

    data: str
    format: Literal["wav", "mp3", "flac", "ogg", "opus", "aac", "m4a", "mp4", "webm"] | None = None


class InputAudioPart(Body):
    """An audio clip within the request."""

    without_effect = _CACHED

    type: Literal["input_audio"]
    input_audio: InputAudio
    uuid: Name | None = None


class AudioEmbedsPart(Body):
    """An audio clip's embeddings, computed elsewhere."""

    without_effect = _CACHED

    type: Literal["audio_embeds"]
    audio_embeds: str | dict[str, str]
    uuid: Name | None = None


class VideoEmbedsPart(Body):
    """A video's embeddings, computed elsewhere."""

    without_effect = _CACHED

    type: Literal["video_embeds"]
    video_embeds: str | dict[str, str]
    uuid: Name | None = None


class EmbedsPart(Body):
    """An image's embeddings, computed elsewhere."""

    without_effect = _CACHED

    type: Literal["image_embeds"]
    image_embeds: str | dict[str, str]
    uuid: Name | None = None


class PromptEmbedsPart(Body):
    """Embeddings in place of a text, for models of text."""

    without_effect = _CACHED

    type: Literal["prompt_embeds"]
    data: str


# Of parts that hold one thing under the name of their type, which they may then leave out.
_TYPES_BY_KEY = frozenset(("text", "image_url", "video_url", "audio_url", "input_audio", "image", "video", "audio"))
_TYPES_BY_KEY |= {"image_embeds", "audio_embeds", "video_embeds"}


def _typed(given: Any) -> Any:
    """Return a part with the type that its one key says, if it names none."""
    if not isinstance(given, dict) or "type" in given:
        return given
    found = _TYPES_BY_KEY & given.keys()
    return {"type": next(iter(found)), **given} if len(found) == 1 else given


Part = Annotated[
    TextPart
    | RefusalPart
    | ThinkingPart
    | ImagePart
    | NamedImagePart
    | InputImagePart
    | VideoPart
    | NamedVideoPart
    | InputVideoPart
    | NamedAudioPart
    | AudioPart
    | InputAudioPart
    | EmbedsPart
    | AudioEmbedsPart
    | VideoEmbedsPart
    | PromptEmbedsPart
    | FilePart
    | InputFilePart,
    Field(discriminator="type"),
    BeforeValidator(_typed),
]
Parts = Annotated[list[Part], Field(max_length=limits.MAX_PARTS, fail_fast=True)]


# An assistant's earlier reasoning.
Reasoning = str | PromptEmbedsPart

# Clients such as LiteLLM write it into every part of a message.
_MARKED = {"provider_specific_fields": "Templates have no place for it."}


class CalledFunction(Body):
    """The function of a call; its arguments are JSON text."""

    without_effect = _MARKED

    says_nothing = {"parsed_arguments": ()}

    name: Name
    arguments: str


class ToolCall(Body):
    """An earlier call by the model."""

    without_effect = _MARKED

    id: Name | None = None
    type: Literal["function"] = "function"
    index: int | None = None
    function: CalledFunction


class CalledCustom(Body):
    """The custom tool of a call, and its input."""

    without_effect = _MARKED

    name: Name
    input: str


class CustomCall(Body):
    """An earlier call of a custom tool."""

    without_effect = _MARKED

    id: Name | None = None
    type: Literal["custom"]
    index: int | None = None
    custom: CalledCustom


def _as_call(given: ToolCall | CustomCall) -> ToolCall:
    """The call of the function that the model sees in a custom tool's place."""
    if isinstance(given, ToolCall):
        return given
    called = CalledFunction(name=given.custom.name, arguments=arguments_of(given.custom.input))
    return ToolCall(id=given.id, index=given.index, function=called)


def _kind_of_tool(given: Any) -> str:
    kind = given.get("type") if isinstance(given, dict) else getattr(given, "type", None)
    return CUSTOM if kind == "custom" else ALLOWED if kind == "allowed_tools" else FUNCTION


# Tags of unions that are keys of nothing, so that errors name the client's own fields. What the validators make of such
# a union is a function's form in any case, which the aliases below say.
FUNCTION, CUSTOM, ALLOWED = "type: function", "type: custom", "type: allowed_tools"
if TYPE_CHECKING:
    _Call = ToolCall
else:
    _Call = Annotated[
        Annotated[ToolCall, Tag(FUNCTION)] | Annotated[CustomCall, Tag(CUSTOM)],
        Discriminator(_kind_of_tool),
        AfterValidator(_as_call),
    ]


class Message(Body):
    """One message of a conversation."""

    without_effect = {
        **_CACHED,
        "id": "Messages are not stored.",
        "provider_specific_fields": "Templates have no place for it.",
        "reasoning_details": "`reasoning` has the text.",
        "thinking_blocks": "`reasoning` has the text.",
        "timestamp": "Templates have no place for it.",
    }
    says_nothing = {
        "images": ([],),
        "annotations": ([],),
        "audio": (),
        "function_call": (),
        "parsed": (),
        "partial": (False,),
        "prefix": (False,),
    }
    remedies = {
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
    tool_calls: Annotated[list[_Call], Field(max_length=limits.MAX_TOOLS, fail_fast=True)] | None = None
    tool_call_id: Name | None = None
    refusal: str | None = None
    reasoning_content: Reasoning | None = None
    reasoning: Reasoning | None = None


# ---------------------------------------------------------------------- tools and formats


class Function(Body):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: Annotated[str, Field(max_length=1 << 16)] | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    # The grammar of a custom tool's input, in Lark.
    _input: str | None = PrivateAttr(None)

    @property
    def input(self) -> str | None:
        """The grammar that the one argument follows, if this stands for a custom tool with one."""
        return self._input

    def hold_to(self, grammar: str | None) -> None:
        """Let the one argument follow a grammar."""
        self._input = grammar


class Tool(Body):
    """A function among the tools."""

    without_effect = _CACHED

    type: Literal["function"]
    function: Function


class InputGrammar(Body):
    """What the input of a custom tool follows."""

    syntax: Literal["lark", "regex"]
    definition: Annotated[str, Field(max_length=1 << 16)]


class CustomFormat(Body):
    """What the input of a custom tool looks like."""

    type: Literal["text", "grammar"]
    grammar: InputGrammar | None = None


class Custom(Body):
    """A tool whose input is a text."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: Annotated[str, Field(max_length=1 << 16)] | None = None
    format: CustomFormat | None = None


class ChatCustomTool(Body):
    """A custom tool among the tools."""

    without_effect = _CACHED

    type: Literal["custom"]
    custom: Custom


class SeenCustom(Tool):
    """The function that the model sees in a custom tool's place; its calls come back as calls of that."""


def _as_tool(given: Tool | ChatCustomTool, info: ValidationInfo) -> Tool:
    if isinstance(given, Tool):
        return given
    own = given.custom
    given_form = None if own.format is None else own.format.grammar
    if own.format is not None and (own.format.type == "grammar") != (given_form is not None):
        raise wrong(f"The format of {own.name} is of the type grammar or has one, not both.", "Send both, or neither.")
    grammar: tuple[str, str] | None = None
    held: str | None = None
    if given_form is not None:
        grammar = (given_form.syntax, given_form.definition)
        held = held_grammar(*grammar)
        if held is None and isinstance(info.context, Notes):
            words = not_held(own.name)
            if info.context.strict:
                raise wrong(words, "Send the tool without a format.")
            info.context.tell("tools", words)
    made = SeenCustom(type="function", function=Function(**function_of(own.name, own.description, grammar)))
    made.function.hold_to(held)
    return made


if TYPE_CHECKING:
    AnyTool = Tool
else:
    AnyTool = Annotated[
        Annotated[Tool, Tag(FUNCTION)] | Annotated[ChatCustomTool, Tag(CUSTOM)],
        Discriminator(_kind_of_tool),
        AfterValidator(_as_tool),
    ]


def bounded_tools(given: Any) -> Any:
    """The tools of a request, unless they are too large together."""
    if exceeds(given, limits.MAX_TOOLS_LETTERS, limits.MAX_TOOLS_VALUES):
        words = f"The tools have more than {limits.MAX_TOOLS_LETTERS} letters or {limits.MAX_TOOLS_VALUES} values"
        raise wrong(words, "Send fewer or smaller ones.")
    return given


class FunctionName(Body):
    """A function by its name."""

    name: Name


class ToolChoice(Body):
    """The one function that must be called."""

    type: Literal["function"]
    function: FunctionName


class CustomChoice(Body):
    """The one custom tool that must be called."""

    type: Literal["custom"]
    custom: FunctionName


def _as_choice(given: Any) -> Any:
    return ToolChoice(type="function", function=given.custom) if isinstance(given, CustomChoice) else given


if TYPE_CHECKING:
    _Named = ToolChoice
else:
    _Named = Annotated[
        Annotated[ToolChoice, Tag(FUNCTION)] | Annotated[CustomChoice, Tag(CUSTOM)],
        Discriminator(_kind_of_tool),
        AfterValidator(_as_choice),
    ]


class AllowedTools(Body):
    """The tools that may be called, and whether one of them must be."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[_Named], Field(min_length=1, max_length=limits.MAX_TOOLS)]


class AllowedChoice(Body):
    """A choice among some of the tools; the model sees no others."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


if TYPE_CHECKING:
    Choice = ToolChoice | AllowedChoice
else:
    Choice = Annotated[
        Annotated[ToolChoice, Tag(FUNCTION)]
        | Annotated[CustomChoice, Tag(CUSTOM)]
        | Annotated[AllowedChoice, Tag(ALLOWED)],
        Discriminator(_kind_of_tool),
        AfterValidator(_as_choice),
    ]


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

    says_nothing = {"include_obfuscation": (False,)}
    without_effect = {"include_obfuscation": "Events are not padded."}

    include_usage: bool = False
    continuous_usage_stats: bool = False


# ---------------------------------------------------------------------- requests


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


_WITHOUT_EFFECT = {
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
    """The common fields of chat and completions."""

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

    says_nothing = _NOTHING
    without_effect = _WITHOUT_EFFECT
    remedies = _REMEDIES

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


def _form(given: Any) -> str:
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
    Discriminator(_form),
]


class CompletionRequest(Sampled):
    """POST /v1/completions."""

    prompt: Prompt
    prompt_embeds: str | Texts | None = None
    logprobs: Whole | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    suffix: str | None = None


_ManyTexts = Annotated[list[str], Field(max_length=limits.MAX_INPUTS, fail_fast=True)]
_ManyLists = Annotated[list[Ids], Field(max_length=limits.MAX_INPUTS, fail_fast=True)]
Inputs = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[_ManyTexts, Tag("texts")]
    | Annotated[Ids, Tag("ids")]
    | Annotated[_ManyLists, Tag("lists")],
    Discriminator(_form),
]


class Pooled(Body):
    """The common fields of requests that pool. Absent fields take the model's defaults."""

    says_nothing = {
        "mm_processor_kwargs": ({},),
        "padding": ("do_not_pad", False),
        "truncation_side": ("right",),
        "user": (),
    }
    without_effect: ClassVar[Mapping[str, str]] = {"request_id": _WITHOUT_EFFECT["request_id"]}
    remedies: ClassVar[Mapping[str, str]] = {
        "mm_processor_kwargs": "Leave it out: pairs are read with the server's own.",
        "padding": "Leave it out: texts are filled up where the model was trained so.",
        "truncation_side": "Leave it out: of a text to pool, the beginning is kept.",
    }

    model: Name | None = None
    priority: Whole | None = None
    truncate_prompt_tokens: Whole | None = None
    cache_salt: Name | None = None
    use_activation: bool | None = None
    normalize: bool | None = None
    softmax: bool | None = None
    activation: bool | None = None
    user: Name | None = None


class ClassifyRequest(Pooled):
    """POST /classify: texts, or a conversation."""

    input: Inputs | None = None
    add_special_tokens: bool | None = None
    messages: Messages | None = None
    chat_template: str | None = None
    chat_template_kwargs: Variables | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    media_io_kwargs: Reading | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class LateChunking(Body):
    """How many tokens of a text have a vector together."""

    chunk_size: Annotated[int, Field(ge=1, lt=2**63)]


class EmbeddingRequest(ClassifyRequest):
    """POST /v1/embeddings: texts, or a conversation."""

    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] | None = None
    embed_dtype: Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"] | None = None
    endianness: Literal["native", "big", "little"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=2**20)] | None = None
    late_chunking_params: LateChunking | None = None


class PoolingRequest(EmbeddingRequest):
    """POST /pooling: texts, or a conversation."""

    task: Name | None = None


class ScoredContent(Body):
    """A side of a pair: the parts of a message."""

    content: Annotated[Parts, Field(min_length=1)]


class ScoredText(Body):
    """A side of a pair: a text."""

    text: str


def _side(given: Any) -> str:
    """The form that a side of a pair is checked against."""
    if not isinstance(given, dict | ScoredContent | ScoredText):
        return "text"
    return "object" if isinstance(given, ScoredText) or "text" in given else "content"


def _sides(given: Any) -> str:
    return "many" if isinstance(given, list) else "one"


Side = Annotated[
    Annotated[str, Tag("text")] | Annotated[ScoredContent, Tag("content")] | Annotated[ScoredText, Tag("object")],
    Discriminator(_side),
]
_ManySides = Annotated[list[Side], Field(min_length=1, max_length=limits.MAX_INPUTS, fail_fast=True)]
Sides = Annotated[Annotated[Side, Tag("one")] | Annotated[_ManySides, Tag("many")], Discriminator(_sides)]


# A bound, which 0 leaves out.
_Most = Annotated[int, Field(ge=0, lt=2**31)]


class ScoreRequest(Pooled):
    """POST /score: pairs, under any of the names of their sides."""

    text_1: Sides | None = None
    text_2: Sides | None = None
    data_1: Sides | None = None
    data_2: Sides | None = None
    queries: Sides | None = None
    documents: Sides | None = None
    items: Sides | None = None
    max_tokens_per_query: _Most | None = None
    max_tokens_per_doc: _Most | None = None
    instruction: str | None = None
    chat_template_kwargs: Variables | None = None


class RerankRequest(Pooled):
    """POST /rerank: documents, and the query by which they are ordered."""

    says_nothing = {**Pooled.says_nothing, "rank_fields": (), "max_chunks_per_doc": ()}

    query: Side
    documents: _ManySides
    top_n: _Most | None = None
    max_tokens_per_query: _Most | None = None
    max_tokens_per_doc: _Most | None = None
    instruction: str | None = None
    return_documents: bool | None = None
    chat_template_kwargs: Variables | None = None


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
