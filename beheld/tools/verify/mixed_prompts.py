"""Prompts with images and a video, for models whose generate() in transformers refuses the combination.

The processor makes the prompt of both kinds in one call. Each item's embeddings come from the model's
get_image_features or get_video_features, called with the item alone, and fill the prompt's placeholders in order.
generate() then receives embeddings along with the ids, and computes positions and masks as usual.

Shapes: E embeddings, H hidden size, T tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

# What generate() needs in addition to embeddings: each token's kind, and the items' grids.
_EXTRA_INPUTS = ("mm_token_type_ids", "image_grid_thw", "video_grid_thw")

# An item's kind, "image" or "video", and the processor's outputs for the item alone.
Item = tuple[str, Mapping[str, Any]]


def embeddings(model: Any, items: Sequence[Item]) -> list[Tensor]:
    """Return each item's embeddings (E, H) from the model's methods."""
    return [_embeds(model, kind, made) for kind, made in items]


def inputs(model: Any, whole: Mapping[str, Any], parts: Sequence[Tensor], place: int, *, added: bool) -> dict[str, Any]:
    """Return generate()'s inputs in place of `whole`, the processor's outputs for the prompt.

    Args:
        model: transformers' model.
        whole: with "input_ids" (1, T).
        parts: the embeddings of each item, in prompt order.
        place: the placeholder id of one embedding.
        added: whether they are added to the placeholder's embedding instead of replacing it.
    """
    ids_1T = whole["input_ids"]
    embeds_1TH = model.get_input_embeddings()(ids_1T)
    made_EH, places_1T = torch.cat(list(parts)), ids_1T == place
    if int(places_1T.sum()) != len(made_EH):
        raise ValueError(f"the prompt has {int(places_1T.sum())} placeholders for {len(made_EH)} embeddings")
    embeds_1TH[places_1T] = made_EH + embeds_1TH[places_1T] if added else made_EH
    extra = {name: whole[name] for name in _EXTRA_INPUTS if name in whole}
    return {"input_ids": ids_1T, "attention_mask": whole["attention_mask"], "inputs_embeds": embeds_1TH} | extra


def _embeds(model: Any, kind: str, made: Mapping[str, Any]) -> Tensor:
    method: Callable[..., Any] | None = getattr(model, "get_video_features", None) if kind == "video" else None
    # Some models take frames as images.
    method = method or model.get_image_features
    # A method that takes any keyword passes it on to its tower.
    known = inspect.signature(method).parameters
    found = method(**{name: made[name] for name in made if name in known}, return_dict=True).pooler_output
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in found])
