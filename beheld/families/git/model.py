"""GIT: BERT's layers after an image, whose rows have neither positions nor the embeddings' norm.

Shapes: T tokens of a step, H hidden size, E embeddings of an image, N images, B prompts, L tokens of a prompt.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from beheld.families._shared.bert_attention import attending
from beheld.families.model import FamilyModel
from beheld.models.surgery.operation import Changes


class _Seen:
    """One extra column: whether a row belongs to an image."""

    width = 1

    def __init__(self, model: Any, changes: Changes) -> None:
        self._embeddings, self._layers = model.git.embeddings, model.git.encoder

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
        """Run the layers; rows of text get their positions and the norm first."""
        placed_TH = embeds_TH + self._embeddings.position_embeddings(positions.reshape(-1))
        text_TH = self._embeddings.LayerNorm(placed_TH)
        rows_TH = torch.where(extra_TW > 0, embeds_TH, text_TH)
        hidden_TH: Tensor = self._layers(rows_TH.unsqueeze(0)).last_hidden_state[0]
        return hidden_TH


def image_features(model: Any, pixel_values: Tensor) -> Tensor:
    """Return the embeddings of images (N, 3, height, width), and their extra column: (N * E, H + 1)."""
    seen = model.git.image_encoder(pixel_values).last_hidden_state
    rows = model.git.visual_projection(seen).flatten(0, 1)
    return torch.cat((rows, rows.new_ones((len(rows), 1))), dim=-1)


def positions_after_image(
    input_ids: Tensor, mm_token_type_ids: Tensor | None = None, **unused: Any
) -> tuple[Tensor, Tensor]:
    """Return positions (1, B, L), which count the text alone, and what is added to later ones (B, 1).

    Args:
        input_ids: (B, L).
        mm_token_type_ids: (B, L), not 0 at the places of images.
    """
    assert mm_token_type_ids is not None
    positions = ((mm_token_type_ids == 0).long().cumsum(-1) - 1).clamp(min=0)
    return positions[None], positions[:, -1:] + 1 - input_ids.shape[1]


def adapt(model: Any, changes: Changes) -> None:
    """Name the layers as other models do, and let them call our attention; see FamilyModel.adapt."""
    encoder = model.git.encoder
    # Not as a submodule: the layers' weights would be listed twice.
    vars(encoder)["layers"] = encoder.layer
    changes.undo_with(lambda: vars(encoder).pop("layers"))
    changes.set(model, "get_decoder", lambda: encoder)
    changes.set(model, "get_rope_index", positions_after_image)
    # Its tower calls whichever attention is set, but its class does not say so.
    changes.set(model.git.image_encoder, "_supports_sdpa", True)
    for layer in encoder.layer:
        changes.set(layer.attention.self, "forward", attending(layer.attention.self))


MODEL = FamilyModel(
    adapt=adapt, image_features=image_features, extra_columns=_Seen, repeats_positions=True, plain_head=True
)
