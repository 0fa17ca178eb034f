"""Images beside a video where transformers' generate() refuses both in one prompt: its own parts, put together.

The prompt is the processor's, of both kinds in one call. Each item's embeddings are those of the model's
get_image_features or get_video_features, given the item alone, and stand in the prompt's places in the order of its
placeholders. generate() itself is then given embeddings along with the ids, and finds positions and masks as ever.

Shapes: E embeddings, H hidden size, T tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

# What generate() needs beside embeddings: which kind of token each is, and how items lie.
_BESIDE = ("mm_token_type_ids", "image_grid_thw", "video_grid_thw")

# An item's kind, "image" or "video", and what the processor makes of it alone.
Item = tuple[str, Mapping[str, Any]]


def embeddings(model: Any, items: Sequence[Item]) -> list[Tensor]:
    """What the model's own methods make of each item alone, (E, H) each."""
    return [_embeds(model, kind, made) for kind, made in items]


def inputs(model: Any, whole: Mapping[str, Any], parts: Sequence[Tensor], place: int, *, added: bool) -> dict[str, Any]:
    """What generate() takes in place of `whole`, the processor's outputs for the prompt.

    Args:
        model: transformers'.
        whole: with "input_ids" (1, T).
        parts: the embeddings of each item, in the order of the prompt.
        place: the id that stands for one of them.
        added: they are added to the embedding of that id.
    """
    ids_1T = whole["input_ids"]
    embeds_1TH = model.get_input_embeddings()(ids_1T)
    made_EH, places_1T = torch.cat(list(parts)), ids_1T == place
    if int(places_1T.sum()) != len(made_EH):
        raise ValueError(f"the prompt has {int(places_1T.sum())} places for {len(made_EH)} embeddings of its items")
    embeds_1TH[places_1T] = made_EH + embeds_1TH[places_1T] if added else made_EH
    told = {name: whole[name] for name in _BESIDE if name in whole}
    return {"input_ids": ids_1T, "attention_mask": whole["attention_mask"], "inputs_embeds": embeds_1TH} | told


def _embeds(model: Any, kind: str, made: Mapping[str, Any]) -> Tensor:
    method: Callable[..., Any] | None = getattr(model, "get_video_features", None) if kind == "video" else None
    # Some know frames as images.
    method = method or model.get_image_features
    # What takes any keyword hands it to its tower.
    known = inspect.signature(method).parameters
    found = method(**{name: made[name] for name in made if name in known}, return_dict=True).pooler_output
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in found])
