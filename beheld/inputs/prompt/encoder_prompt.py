"""Prompts of encoder-decoder models: the whole prompt becomes one item that the decoder cross-attends to."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from beheld.core.config import ModelInfo
from beheld.core.errors import PromptError, PromptTooLongError
from beheld.core.media import MediaItem, MediaSpan
from beheld.inputs.media.digest import Digest, salted
from beheld.inputs.prompt.chunked_tokenize import REDUCE


def fold(
    token_ids: Sequence[int], spans: Sequence[MediaSpan], info: ModelInfo, salt: bytes
) -> tuple[tuple[int, ...], tuple[MediaSpan, ...]]:
    """Return the decoder's prompt, which is the token that starts every answer, and the encoder's prompt as its item.

    Args:
        token_ids: the whole prompt, every placeholder expanded.
        spans: its media, in order.
        info: the model.
        salt: callers with different salts share no states; may be empty.

    Raises:
        PromptError, PromptTooLongError: it is empty, or longer than the encoder's limit.
    """
    assert info.cross is not None
    assert info.decoder_start_id is not None
    count, most = len(token_ids), info.cross.num_states
    if count == 0:
        raise PromptError("The prompt is empty.", "Send at least one token.")
    if count > most:
        raise PromptTooLongError(f"The prompt has {count} tokens; the encoder reads at most {most}.", REDUCE)
    places = [(span.start, span.item.digest) for span in spans]
    digest = salted(Digest("encoder prompt").add(array("q", token_ids).tobytes()).add(places).done(), salt)
    item = MediaItem(
        modality="prompt",
        digest=digest,
        features=_features(token_ids, spans),
        layout={},
        replacement_ids=(info.decoder_start_id,),
        embed_mask=(False,),
        num_embeds=0,
        num_states=count,
    )
    return item.replacement_ids, (MediaSpan(item, 0, 1),)


def _features(token_ids: Sequence[int], spans: Sequence[MediaSpan]) -> dict[str, object]:
    """Return the ids as a row, and each feature of the media, concatenated over items."""
    import torch

    features: dict[str, object] = {"input_ids": torch.tensor([list(token_ids)], dtype=torch.int64)}
    for name in spans[0].item.features if spans else ():
        features[name] = torch.cat([span.item.features[name] for span in spans])
    return features
