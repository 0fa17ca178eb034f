"""The fields of the forms of /v1/audio/transcriptions and /v1/audio/translations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from beheld.server.body_schema import Body, Name, Number, Whole
from beheld.server.errors import HttpError
from beheld.server.multipart import Part

_MAX_PROMPT = 16 << 10
_SWITCHES = (
    "use_beam_search",
    "include_stop_str_in_output",
    "stream",
    "stream_include_usage",
    "stream_continuous_usage_stats",
)
_FLAGS = {"true": True, "1": True, "false": False, "0": False}


class SpeechFields(Body):
    """What both routes have, without the audio."""

    without_effect: ClassVar[Mapping[str, str]] = {
        "chunking_strategy": "Long audio is always cut into windows as the model needs.",
        "include_stop_str_in_output": "Transcripts have no stop strings.",
        "watermarking": "Texts are not marked.",
    }
    says_nothing: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "hotwords": ("",),
        "include": ([],),
        "to_language": ("en", "english"),
        "vllm_xargs": ("{}", {}),
    }
    remedies: ClassVar[Mapping[str, str]] = {
        "url": "Send the audio as file in a form, or its address as file_url in JSON.",
        "to_language": "Leave it out: translations are in English.",
    }

    model: Name | None = None
    language: Name | None = None
    prompt: Annotated[str, Field(max_length=_MAX_PROMPT)] | None = None
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] | None = None
    temperature: Number | None = None
    stream: bool | None = None
    stream_include_usage: bool | None = None
    stream_continuous_usage_stats: bool | None = None
    seed: Whole | None = None
    top_p: Number | None = None
    top_k: Whole | None = None
    min_p: Number | None = None
    frequency_penalty: Number | None = None
    presence_penalty: Number | None = None
    repetition_penalty: Number | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    use_beam_search: bool | None = None
    n: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    length_penalty: Number | None = None


class TranslationRequest(SpeechFields):
    """POST /v1/audio/translations: a form."""

    file: bytes = Field(min_length=1, json_schema_extra={"format": "binary"})

    @property
    def audio(self) -> bytes | str:
        """The audio."""
        return self.file


class TranslationLink(SpeechFields):
    """POST /v1/audio/translations: JSON, as lines of batches have it."""

    file_url: Annotated[str, Field(min_length=1)]

    @property
    def audio(self) -> bytes | str:
        """Where the audio is."""
        return self.file_url


class _Transcribed(Body):
    """The fields that transcriptions have and translations lack."""

    says_nothing: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "hotwords": ("",),
        "include": ([],),
        "to_language": ("",),
        "vllm_xargs": ("{}",),
    }
    remedies: ClassVar[Mapping[str, str]] = {
        "url": "Send the audio as file.",
        "to_language": "Use /v1/audio/translations, whose words are English.",
    }

    timestamp_granularities: Annotated[list[Literal["word", "segment"]], Field(max_length=2)] | None = None


class TranscriptionRequest(_Transcribed, TranslationRequest):
    """POST /v1/audio/transcriptions: a form."""


class TranscriptionLink(_Transcribed, TranslationLink):
    """POST /v1/audio/transcriptions: JSON, as lines of batches have it."""


# What a route's body may be.
Speech = TranslationRequest | TranslationLink

_LISTS = ("timestamp_granularities", "include")
_NUMBERS = (
    "length_penalty", "temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
)  # fmt: skip
_WHOLES = ("seed", "top_k", "max_completion_tokens", "n")


def values_of(parts: list[Part]) -> dict[str, Any]:
    """The fields of a form as the schema has them: texts become numbers and flags by their field's name.

    Raises:
        HttpError: 400; a field comes twice, or has a value of another kind.
    """
    found: dict[str, Any] = {}
    for part in parts:
        name = part.name.removesuffix("[]")
        if name == "file":
            value: Any = part.content
        else:
            value = _read(name, part.text())
        if name in _LISTS:
            found.setdefault(name, []).append(value)
        elif name in found:
            raise HttpError(400, "The field comes twice.", "Send it once.", param=name[:64])
        else:
            found[name] = value
    return found


def _read(name: str, text: str) -> Any:
    try:
        if name in _NUMBERS:
            return float(text)
        if name in _WHOLES:
            return int(text)
    except ValueError:
        raise HttpError(400, "The field is not a number.", "Send one.", param=name) from None
    if name in _SWITCHES:
        if text.lower() not in _FLAGS:
            raise HttpError(400, "The field is neither true nor false.", "Send one of them.", param=name)
        return _FLAGS[text.lower()]
    return text
