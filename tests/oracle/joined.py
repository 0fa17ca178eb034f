"""Images and a video in one prompt, for models whose generate() refuses it: see beheld/verify/mixed_prompts.py."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import torch

from beheld.families import registry
from beheld.verify import mixed_prompts
from tests.oracle import reference
from tests.oracle.cases import Ask


def inputs(family: str, ask: Ask) -> dict[str, Any]:
    """What generate() takes for `ask`: ids, what says which kind of token they are and how items lie, embeddings."""
    model = reference.model(family)
    with torch.no_grad():
        parts = mixed_prompts.embeddings(model, _items(family, ask))
        options = registry.facts(registry.find(model.config.model_type)).reference
        place, added = reference.image_token(family), options.adds_to_placeholder
        return mixed_prompts.inputs(model, reference.inputs(family, ask), parts, place, added=added)


def _items(family: str, ask: Ask) -> list[mixed_prompts.Item]:
    """Each item of `ask`, in the order of the markers, as the processor makes it in a request of it alone."""
    bare = replace(ask, content="", images=(), videos=())
    images, clips = iter(ask.images), iter(ask.videos)
    alone = [
        ("image", replace(bare, content=marker, images=(next(images),)))
        if marker == "{i}"
        else ("video", replace(bare, content=marker, videos=(next(clips),)))
        for marker in re.findall(r"\{[iv]\}", ask.content)
    ]
    return [(kind, reference.inputs(family, one)) for kind, one in alone]
