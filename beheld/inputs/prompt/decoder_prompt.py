"""Prompts of decoders after an encoder that reads one media item: the item belongs to the whole prompt."""

from __future__ import annotations

from collections.abc import Sequence

from beheld.core.config import ModelInfo
from beheld.core.errors import PromptError
from beheld.core.media import MediaSpan


def join(
    token_ids: Sequence[int], spans: Sequence[MediaSpan], info: ModelInfo
) -> tuple[tuple[int, ...], tuple[MediaSpan, ...]]:
    """Return the decoder's prompt, and the item at its first position, so that every position depends on it.

    Args:
        token_ids: the prompt; the item's token, an ordinary one, may be anywhere in it.
        spans: the item's place.
        info: the model.

    Raises:
        PromptError: there is no item, or there are several.
    """
    if len(spans) != 1:
        raise PromptError(
            f"{info.architecture} reads one {info.encoder_reads} per prompt; this prompt has {len(spans)}.",
            f'Write {{"prompt": ..., "multi_modal_data": {{"{info.encoder_reads}": ...}}}}.',
        )
    return tuple(token_ids), (MediaSpan(spans[0].item, 0, 1),)
