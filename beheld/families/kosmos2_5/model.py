"""Kosmos 2.5: the rows of an image, its two marks included, have an embedding of their own added.

Shapes: T tokens of a step, H hidden size, E embeddings of one tower call, N images, P patches, C channels of a patch.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from beheld.families.model import FamilyModel
from beheld.models.surgery.operation import Changes


class _Segments:
    """One extra column: whether a row belongs to an image. A prompt's first position follows the padding's."""

    width = 1

    def __init__(self, model: Any, changes: Changes) -> None:
        self._text = model.text_model.model
        self._first = model.config.text_config.pad_token_id + 1

    def of_tokens(self, ids_T: Tensor, embeds_TH: Tensor) -> Tensor | None:
        """Return None: rows of text have zero."""
        return None

    def of_media(self, result: Any) -> Tensor | None:
        """See ExtraColumns; `image_features` makes them."""
        return None

    def of_given(self, embeds_EH: Tensor) -> Tensor | None:
        """Return ones (E, 1)."""
        return embeds_EH.new_ones((embeds_EH.shape[0], 1))

    def hidden(self, embeds_TH: Tensor, extra_TW: Tensor, positions: Tensor) -> Tensor:
        """Run the layers; rows of images get the second segment's embedding."""
        output = self._text(
            inputs_embeds=embeds_TH.unsqueeze(0),
            image_embeds_position_mask=extra_TW.T,
            position_ids=positions + self._first,
            use_cache=False,
        )
        hidden_TH: Tensor = output.last_hidden_state[0]
        return hidden_TH


def image_features(model: Any, flattened_patches: Tensor, mark_ids: Tensor) -> Tensor:
    """Return the embeddings of images with their marks, and their extra column: (N * E, H + 1).

    Args:
        model: Kosmos2_5ForConditionalGeneration.
        flattened_patches: (N, P, C).
        mark_ids: (N, 2), the tokens around each image.
    """
    seen = torch.nn.functional.normalize(model.vision_model(flattened_patches=flattened_patches)[0], dim=-1)
    images_NEH, _ = model.image_to_text_projection(seen)
    marks = model.get_input_embeddings()(mark_ids)
    rows = torch.cat((marks[:, :1], images_NEH, marks[:, 1:]), dim=1).flatten(0, 1)
    return torch.cat((rows, rows.new_ones((len(rows), 1))), dim=-1)


def adapt(model: Any, changes: Changes) -> None:
    """Let the projector attend as it does in transformers, and name the decoder; see FamilyModel.adapt.

    The projector shares the text's configuration, and its queries are no tokens of a sequence.
    """
    attention = model.image_to_text_projection.x_attn
    own = copy.deepcopy(attention.config)
    own._attn_implementation = "sdpa"
    changes.set(attention, "config", own)
    changes.set(model, "get_decoder", lambda: model.text_model.model)


MODEL = FamilyModel(adapt=adapt, image_features=image_features, extra_columns=_Segments, columns_before_layers=True)
