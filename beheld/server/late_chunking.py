"""Late chunking: a vector for each stretch of a text's tokens, the mean of their vectors, which know the whole text."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from beheld.core.outputs import PoolingRequestOutput
from beheld.core.pooling import PoolerInfo
from beheld.server.errors import HttpError
from beheld.server.schema import EmbeddingRequest

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
    output: PoolingRequestOutput, text: str, size: int, tokenizer: Any, *, special: bool, activate: bool
) -> tuple[PoolingRequestOutput, dict[str, Any]]:
    """Return the output with the vectors of its chunks, and where they stand.

    Args:
        output: with the vectors of the text's tokens, not scaled.
        text: what was sent.
        size: tokens of a chunk.
        tokenizer: the model's.
        special: whether the prompt has the tokenizer's special tokens.
        activate: whether vectors are scaled to length 1.

    Raises:
        HttpError: the tokens have no places in the text.
    """
    encoded = _plain(tokenizer).encode(text, add_special_tokens=special)
    values, places = output.outputs.data, encoded.offsets
    if encoded.ids != list(output.prompt_token_ids) or len(values) != len(places):
        raise HttpError(400, "The tokens of this text have no places in it.", "Leave it out.", param=_NAME)
    starts = range(0, len(places), min(size, len(places)))
    made = values.new_zeros(len(starts), values.shape[1])
    chunks = []
    for row, start in enumerate(starts):
        stop = min(start + size, len(places))
        made[row] = values[start:stop].mean(0)
        chunks.append({"token_range": [start, stop], "char_range": _letters(places[start:stop])})
    if activate:
        made = made / made.norm(dim=-1, keepdim=True).clamp_min(1e-12)
    metadata = {"strategy": "fixed_tokens", "chunk_size": size, "input_tokens": len(places), "chunks": chunks}
    return replace(output, outputs=replace(output.outputs, data=made)), {"late_chunking": metadata}


@lru_cache(maxsize=2)
def _plain(tokenizer: Any) -> Any:
    """Return a copy that neither cuts texts nor fills them up, as the checkpoint's own may.

    Changes to the other one would change how other requests are tokenized.
    """
    made = copy.deepcopy(tokenizer.backend_tokenizer)
    made.no_truncation()
    made.no_padding()
    return made


def _letters(places: Sequence[tuple[int, int]]) -> list[int] | None:
    """Return from where to where in the text the tokens stand; None for special tokens alone."""
    real = [(start, stop) for start, stop in places if start < stop]
    return [min(start for start, _ in real), max(stop for _, stop in real)] if real else None
