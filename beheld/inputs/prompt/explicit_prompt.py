"""The form of a prompt that names the encoder's and the decoder's part, as vLLM's scripts for Whisper write it.

{"encoder_prompt": {"prompt": "", "multi_modal_data": {"audio": ...}}, "decoder_prompt": "<|startoftranscript|>"}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from beheld.core.config import ModelInfo
from beheld.core.errors import PromptError
from beheld.core.value_checks import nearest

_KEYS = ("encoder_prompt", "decoder_prompt", "mm_processor_kwargs", "cache_salt", "add_special_tokens")
_TEXTS = ("prompt", "prompt_token_ids")


def given(prompt: Mapping[str, Any]) -> bool:
    """Return whether a prompt has this form."""
    return "encoder_prompt" in prompt or "decoder_prompt" in prompt


def joined(prompt: Mapping[str, Any], info: ModelInfo) -> dict[str, Any]:
    """Return the same prompt in the usual form.

    Raises:
        PromptError: the model has no such parts, or they hold what the model does not read.
    """
    if not info.is_encoder_decoder:
        raise PromptError(
            f"{info.architecture} has no encoder for prompts.", 'Write {"prompt": ...}.', param="encoder_prompt"
        )
    for key in prompt:
        if key not in _KEYS:
            remedy = nearest(str(key), _KEYS) or f"Known: {', '.join(_KEYS)}."
            raise PromptError(
                f"Unknown prompt key {key!r}; the prompt has encoder_prompt or decoder_prompt.", remedy, param=str(key)
            )
    encoder, decoder = _part(prompt, "encoder_prompt"), _part(prompt, "decoder_prompt")
    common = {key: prompt[key] for key in _KEYS[2:] if prompt.get(key) is not None}
    if info.encoder_reads == "prompt":
        if any(_holds(decoder, name) for name in (*_TEXTS, "multi_modal_data")):
            raise PromptError(
                f"The decoder of {info.architecture} starts a new sequence and takes no prompt.",
                "Leave decoder_prompt out, or None.",
                param="decoder_prompt",
            )
        return {**encoder, **common}
    if any(_holds(encoder, name) for name in _TEXTS):
        raise PromptError(
            f"The encoder of {info.architecture} reads {info.encoder_reads} and no text.",
            "Write the text as decoder_prompt.",
            param="encoder_prompt",
        )
    media = {key: value for key, value in encoder.items() if key not in _TEXTS}
    return {**_text_of(decoder), **media, **common}


def _part(prompt: Mapping[str, Any], name: str) -> dict[str, Any]:
    part = prompt.get(name)
    if part is None:
        return {}
    if isinstance(part, str):
        return {"prompt": part}
    if isinstance(part, Mapping):
        return dict(part)
    if isinstance(part, list | tuple):
        return {"prompt_token_ids": list(part)}
    raise PromptError(f"{name} cannot be a {type(part).__name__}.", 'Send text, or {"prompt": ...}.', param=name)


def _holds(part: Mapping[str, Any], name: str) -> bool:
    value = part.get(name)
    return value is not None and len(value) > 0


def _text_of(decoder: Mapping[str, Any]) -> dict[str, Any]:
    """Return the decoder's text or ids.

    Raises:
        PromptError: it holds anything else.
    """
    for key, value in decoder.items():
        if key not in _TEXTS and value is not None:
            raise PromptError(
                f"decoder_prompt holds {key!r}, which belongs to encoder_prompt.", "Move it.", param="decoder_prompt"
            )
    ids = decoder.get("prompt_token_ids")
    return {"prompt": decoder.get("prompt") or ""} if ids is None else {"prompt_token_ids": ids}
