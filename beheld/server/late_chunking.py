"""Late chunking: a vector for each stretch of a text's tokens, the mean of their vectors, which know the whole text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from beheld.core.outputs import PoolingRequestOutput
from beheld.core.pooling import PoolerInfo
from beheld.server.errors import HttpError
from beheld.server.pooling_schema import EmbeddingRequest

_NAME = "late_chunking_params"


def check(body: EmbeddingRequest, task: str | None, info: PoolerInfo, tokenizer: Any) -> None:
    """Raise HttpError if a request for chunks is for another task, or its input is not what it is read as."""
    if task != "token_embed":
        raise HttpError(
            400,
            f"{_NAME} are for vectors of tokens.",
            "Leave them out. The operator may start with --pooler-config.task token_embed.",
            param=_NAME,
        )
    texts = [body.input] if isinstance(body.input, str) else body.input
    if body.messages is not None or not texts or not all(isinstance(text, str) and text for text in texts):
        raise HttpError(400, f"{_NAME} need texts that are not empty.", "Send input as text.", param="input")
    if body.truncate_prompt_tokens is not None:
        raise HttpError(
            400, f"{_NAME} and truncate_prompt_tokens cannot be combined.", "Leave one of them out.", param=_NAME
        )
    if info.lowercase or info.filled_to is not None or not getattr(tokenizer, "is_fast", False):
        raise HttpError(
            400, "This model's tokens do not stand for the text as it was sent.", "Leave it out.", param=_NAME
        )


def chunked(
    output: PoolingRequestOutput, ids: list[int], places: list[tuple[int, int]], size: int, *, activate: bool
) -> tuple[PoolingRequestOutput, dict[str, Any]]:
    """Return the output with the vectors of its chunks, and where they stand.

    Args:
        output: with the vectors of the text's tokens, not scaled.
        ids, places: of the text as it was sent, and from where to where in it each token stands.
        size: tokens of a chunk.
        activate: whether vectors are scaled to length 1.

    Raises:
        HttpError: the tokens have no places in the text.
    """
    values = output.outputs.data
    if ids != list(output.prompt_token_ids) or len(values) != len(places):
        raise HttpError(400, "The tokens of this text have no places in it.", "Leave it out.", param=_NAME)
    length = min(size, len(places))
    whole, left = divmod(len(places), length)
    made = values.new_empty(whole + bool(left), values.shape[1])
    made[:whole] = values[: whole * length].unflatten(0, (whole, length)).mean(1)
    if left:
        made[whole] = values[-left:].mean(0)
    chunks = []
    for start in range(0, len(places), length):
        stop = min(start + length, len(places))
        chunks.append({"token_range": [start, stop], "char_range": _letters(places[start:stop])})
    if activate:
        made = made / made.norm(dim=-1, keepdim=True).clamp_min(1e-12)
    metadata = {"strategy": "fixed_tokens", "chunk_size": size, "input_tokens": len(places), "chunks": chunks}
    return replace(output, outputs=replace(output.outputs, data=made)), {"late_chunking": metadata}


def _letters(places: Sequence[tuple[int, int]]) -> list[int] | None:
    """Return from where to where in the text the tokens stand; None for special tokens alone."""
    real = [(start, stop) for start, stop in places if start < stop]
    return [min(start for start, _ in real), max(stop for _, stop in real)] if real else None
