"""Which states of a prompt are kept, so that other prompts can continue from them: not all of them fit."""

from __future__ import annotations

from collections.abc import Iterator

from beheld.core.config import KVGroup, ModelInfo
from beheld.core.request import Request


def keeping(info: ModelInfo) -> KVGroup | None:
    """The first group of recurrent layers or of short convolutions, if there is one."""
    return next((group for group in info.kv_groups if group.keeps_few), None)


def checkpoint_blocks(request: Request, info: ModelInfo, block_size: int) -> frozenset[int] | None:
    """The blocks at whose ends a state is kept; None if the model has no recurrent layers and no short convolutions.

    A prefix that others are likely to have ends after the system prompt, after each media item, and after each turn;
    the state is kept at the last end of a block up to there. So that long texts are not computed from their start, a
    state is also kept every `checkpoint_tokens`.

        system prompt  .  user: image  question  .        . an id that ends an answer, and so a turn
                       ^             ^           ^
    """
    group = keeping(info)
    if group is None:
        return None
    every = max(1, group.checkpoint_tokens // block_size) * block_size
    last = len(request.token_ids) - 1
    ends = {*range(every, last + 1, every), *_edges(request, info), last}
    return frozenset(end // block_size - 1 for end in ends if end >= block_size)


def _edges(request: Request, info: ModelInfo) -> Iterator[int]:
    """Positions after the turns and after the media of a prompt."""
    yield from (position + 1 for position, token in enumerate(request.token_ids) if token in info.eos_ids)
    for span in request.spans:
        yield span.start
        yield span.stop
