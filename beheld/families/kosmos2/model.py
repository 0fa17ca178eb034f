"""Kosmos 2: an image's embeddings are those of learned queries, between two marks.

Shapes: T tokens of a step, H hidden size, E embeddings of an image, N images.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from beheld.families.model import FamilyModel
from beheld.models.surgery.operation import Changes


def image_features(model: Any, pixel_values: Tensor, mark_ids: Tensor) -> Tensor:
    """Return the embeddings of images with their marks: (N * (E + 2), H).

    Args:
        model: Kosmos2ForConditionalGeneration.
        pixel_values: (N, 3, height, width).
        mark_ids: (N, 2), the tokens around each image.
    """
    tower = model.vision_model
    seen = torch.nn.functional.normalize(tower.model.post_layernorm(tower(pixel_values=pixel_values)[0]), dim=-1)
    images_NEH, _ = model.image_to_text_projection(seen)
    marks = model.get_input_embeddings()(mark_ids)
    return torch.cat((marks[:, :1], images_NEH, marks[:, 1:]), dim=1).flatten(0, 1)


def adapt(model: Any, changes: Changes) -> None:
    """Let the projector attend as it does in transformers, and name the decoder; see FamilyModel.adapt.

    The projector shares the text's configuration, and its queries are no tokens of a sequence. The table of positions
    has its first rows for the padding: a prompt's first position is the row after them.
    """
    attention, decoder = model.image_to_text_projection.x_attn, model.text_model.model
    own = copy.deepcopy(attention.config)
    own._attn_implementation = "sdpa"
    changes.set(attention, "config", own)
    changes.set(model, "get_decoder", lambda: decoder)
    # It makes its causal mask itself.
    changes.set(decoder, "_prepare_decoder_attention_mask", lambda *unused: None)
    table, first = decoder.embed_positions, model.config.text_config.pad_token_id + 1

    def placed(position_ids: Tensor, **unused: Any) -> Tensor:
        """Return the embeddings (1, T, H) of positions (1, T)."""
        found: Tensor = table.weights[position_ids + first]
        return found

    changes.set(table, "forward", placed)


MODEL = FamilyModel(adapt=adapt, image_features=image_features)
