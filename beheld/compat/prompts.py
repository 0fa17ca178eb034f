"""Prompts as typed dicts, for scripts that are type-checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict


class TextPrompt(TypedDict):
    """A text prompt with its media."""

    prompt: str
    multi_modal_data: NotRequired[Mapping[str, Any]]
    mm_processor_kwargs: NotRequired[Mapping[str, Any]]
    multi_modal_uuids: NotRequired[Mapping[str, Any]]
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt of token ids with its media."""

    prompt_token_ids: list[int]
    multi_modal_data: NotRequired[Mapping[str, Any]]
    mm_processor_kwargs: NotRequired[Mapping[str, Any]]
    multi_modal_uuids: NotRequired[Mapping[str, Any]]
    cache_salt: NotRequired[str]


class EmbedsPrompt(TypedDict):
    """A prompt of embeddings, a tensor (tokens, hidden)."""

    prompt_embeds: Any
    cache_salt: NotRequired[str]


class ScoreMultiModalParam(TypedDict):
    """One side of a pair for `LLM.score`: parts of a chat message."""

    content: list[Any]


class ExplicitEncoderDecoderPrompt(TypedDict):
    """The two prompts of a model with an encoder."""

    encoder_prompt: Any
    decoder_prompt: Any


MultiModalDataDict = Mapping[str, Any]
MultiModalDataBuiltins = MultiModalDataDict
MultiModalUUIDDict = Mapping[str, Any]
ModalityData = Any
SingletonPrompt = str | TextPrompt | TokensPrompt | EmbedsPrompt
