"""Embeddings (tokens, hidden) in place of ids: a whole prompt, {"prompt_embeds": tensor}, or parts of messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from beheld.core.config import MediaLimits, ModelInfo
from beheld.core.errors import DecodeError, PromptError
from beheld.core.media import MediaSpan
from beheld.inputs.media import embeds

KEY = "prompt_embeds"
# The key of a part of a message, whose type is KEY.
DATA = "data"
# Embeddings of one item at most, so that prompts share what they begin with.
_PIECE = 512


@dataclass(frozen=True, eq=False)
class EmbeddedRange:
    """Embeddings (tokens, hidden) that take the place of ids, from the position `start` of a prompt on."""

    start: int
    tensor: Any


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
    return checked(prompt[KEY], info, limits, KEY)


def checked(value: Any, info: ModelInfo, limits: MediaLimits, param: str) -> Any:
    """Return a user's embeddings as `tensor_of` does; `param` is their field in errors.

    Raises:
        PromptError: their shape, type or width is wrong.
        LimitError: base64 holds more than `limits` allow.
    """
    try:
        value = embeds.from_base64(value, limits)
        return embeds.check(value[0] if getattr(value, "ndim", 0) == 3 and len(value) == 1 else value, info)
    except DecodeError as error:
        raise PromptError(
            f'"{param}" must be one tensor (tokens, {info.hidden_size}) of finite floating-point numbers: '
            f"{error.reason}",
            "Look the prompt's ids up in the model's own embeddings.",
            param=param,
        ) from error


def fill(info: ModelInfo, count: int) -> tuple[int, ...]:
    """Return the ids that stand for embeddings: no token has them, so no penalty is about them."""
    return (info.vocab_size,) * count


def spans(embedded: Sequence[EmbeddedRange], info: ModelInfo, most: int) -> tuple[MediaSpan, ...]:
    """Return the embeddings as items at their places in the prompt, each of at most `most`."""
    found = []
    for part in embedded:
        start = part.start
        for piece in part.tensor.split(min(_PIECE, most)):
            item = embeds.to_item(embeds.Embeddings(piece.contiguous(), {}), "prompt", info.vocab_size)
            found.append(MediaSpan(item, start, start + item.num_embeds))
            start += item.num_embeds
    return tuple(found)


def insert(
    token_ids: Sequence[int], tensor_by_id: Mapping[int, Any], info: ModelInfo
) -> tuple[tuple[int, ...], tuple[EmbeddedRange, ...]]:
    """Replace the ids that stand for embeddings by as many ids as those have; return them with the embeddings' places.

    Args:
        token_ids: the prompt.
        tensor_by_id: an id that no token has -> the embeddings in its place.
        info: the model.
    """
    ids: list[int] = []
    found = []
    for token in token_ids:
        tensor = tensor_by_id.get(token)
        if tensor is None:
            ids.append(token)
        else:
            found.append(EmbeddedRange(len(ids), tensor))
            ids += fill(info, len(tensor))
    return tuple(ids), tuple(found)
