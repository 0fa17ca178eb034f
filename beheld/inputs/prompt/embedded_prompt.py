"""A prompt of embeddings in place of token ids: {"prompt_embeds": tensor (tokens, hidden)}."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from beheld.core.config import MediaLimits, ModelInfo
from beheld.core.errors import DecodeError, PromptError
from beheld.core.media import MediaSpan
from beheld.inputs.media import embeds

KEY = "prompt_embeds"
# Embeddings of one item at most, so that prompts share what they begin with.
_PIECE = 512


def tensor_of(prompt: Mapping[str, Any], info: ModelInfo, limits: MediaLimits) -> Any:
    """Return the embeddings (tokens, hidden) in float32 on the CPU; a single prompt may be a batch of one.

    They are given as a tensor, or as base64 of `torch.save(tensor)` or of safetensors with one tensor.

    Raises:
        PromptError: their shape, type or width is wrong, or the prompt has something besides.
        LimitError: base64 holds more than `limits` allow.
    """
    for key, value in prompt.items():
        if key not in (KEY, "cache_salt") and value is not None and (not hasattr(value, "__len__") or len(value)):
            raise PromptError(
                f"A prompt of embeddings has no {key!r} besides.", "Leave it out, or send text.", param=key
            )
    try:
        value = embeds.from_base64(prompt[KEY], limits)
        return embeds.check(value[0] if getattr(value, "ndim", 0) == 3 and len(value) == 1 else value, info)
    except DecodeError as error:
        raise PromptError(
            f'"{KEY}" must be one tensor (tokens, {info.hidden_size}) of finite floating-point numbers: {error.reason}',
            "Look the prompt's ids up in the model's own embeddings.",
            param=KEY,
        ) from error


def fill(info: ModelInfo, count: int) -> tuple[int, ...]:
    """Return the ids that stand for embeddings: no token has them, so no penalty is about them."""
    return (info.vocab_size,) * count


def spans(tensor: Any, info: ModelInfo, most: int) -> tuple[MediaSpan, ...]:
    """Return the embeddings as items over the whole prompt, each of at most `most`."""
    found, start = [], 0
    for piece in tensor.split(min(_PIECE, most)):
        item = embeds.to_item(embeds.Embeddings(piece.contiguous(), {}), "prompt", info.vocab_size)
        found.append(MediaSpan(item, start, start + item.num_embeds))
        start += item.num_embeds
    return tuple(found)
