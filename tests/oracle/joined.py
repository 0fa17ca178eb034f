"""Pictures beside a video where transformers' generate() refuses both in one prompt: its own parts, put together.

The prompt is the processor's, of both kinds in one call. Each item's embeddings are those of the model's
get_image_features or get_video_features, given the item alone, and stand in the prompt's places in the order of its
markers. generate() itself is then given embeddings beside the ids, and finds positions and masks as for any prompt.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tests.oracle import reference
from tests.oracle.cases import Ask


def inputs(family: str, ask: Ask) -> dict[str, Any]:
    """What generate() takes for `ask`: ids, what says which kind of token they are and how items lie, embeddings."""
    whole = reference.inputs(family, ask)
    model = reference.model(family)
    ids_1T = whole["input_ids"]
    with torch.no_grad():
        embeds_1TH = model.get_input_embeddings()(ids_1T)
        made_EH = torch.cat([_embeds(family, item) for item in _items(ask)])
    places_1T = ids_1T == reference.image_token(family)
    assert int(places_1T.sum()) == len(made_EH), "The prompt has other places than the items have embeddings."
    # Molmo 2 adds what it sees to the embedding of the place.
    embeds_1TH[places_1T] = made_EH + embeds_1TH[places_1T] if family == "molmo2" else made_EH
    told = {name: whole[name] for name in whole if name == "mm_token_type_ids" or name.endswith("_grid_thw")}
    return {"input_ids": ids_1T, "attention_mask": whole["attention_mask"], "inputs_embeds": embeds_1TH} | told


def _items(ask: Ask) -> list[Ask]:
    """For each item of `ask`, in the order of the markers, a request of it alone."""
    bare = replace(ask, content="", images=(), videos=())
    images, clips = iter(ask.images), iter(ask.videos)
    return [
        replace(bare, content=marker, images=(next(images),))
        if marker == "{i}"
        else replace(bare, content=marker, videos=(next(clips),))
        for marker in re.findall(r"\{[iv]\}", ask.content)
    ]


def _embeds(family: str, alone: Ask) -> Tensor:
    """The embeddings (E, H) of a request's one item."""
    model, made = reference.model(family), reference.inputs(family, alone)
    method: Callable[..., Any] | None = getattr(model, "get_video_features", None) if alone.videos else None
    # Some know frames as pictures.
    method = method or model.get_image_features
    # What takes any keyword hands it to its tower.
    known = inspect.signature(method).parameters
    found = method(**{name: made[name] for name in made if name in known}, return_dict=True).pooler_output
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in found])
