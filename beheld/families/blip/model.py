"""BLIP: BERT's layers as a decoder, each of which attends to the image after the text before it.

Shapes: T tokens of a step, H hidden size, E states of an image.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from beheld.attention.context import current
from beheld.attention.cross import CrossView
from beheld.core.plan import EncodeItem, SpanView
from beheld.families._shared.bert_attention import attending
from beheld.families.model import FamilyModel
from beheld.models.cross import CrossAttention, keys_and_values
from beheld.models.surgery.operation import Changes


def _looking(block: Any) -> Any:
    """Return the forward of a BlipTextAttention around cross-attention; tokens that see no image pass it unchanged."""

    def forward(hidden_states: Tensor, **unused: Any) -> tuple[Tensor, None]:
        """Attend (1, T, H) -> (1, T, H)."""
        cross = current().cross
        if cross is None:
            return hidden_states, None
        seen, _ = block.self(hidden_states)
        sighted = cross.metadata.sighted_T[None, :, None] > 0
        return torch.where(sighted, block.output(seen, hidden_states), hidden_states), None

    return forward


def adapt(model: Any, changes: Changes) -> None:
    """Name parts as other models do, and put our attention into the layers; see FamilyModel.adapt."""
    decoder = model.text_decoder
    encoder = decoder.bert.encoder
    # Not as a submodule: the layers' weights would be listed twice.
    vars(encoder)["layers"] = encoder.layer
    changes.undo_with(lambda: vars(encoder).pop("layers"))
    changes.set(model, "get_decoder", lambda: encoder)
    changes.set(model, "get_output_embeddings", decoder.get_output_embeddings)
    # Its layers ask no interface, and are made to call our attention below.
    changes.set(decoder, "_can_set_attn_implementation", lambda: True)
    for index, layer in enumerate(encoder.layer):
        changes.set(layer.attention.self, "forward", attending(layer.attention.self))
        old = layer.crossattention.self
        # The enclosing block has the projection that follows.
        parts = {kind[0]: (kind, getattr(old, kind)) for kind in ("query", "key", "value")}
        scale = old.attention_head_size**-0.5
        new = CrossAttention(index, {**parts, "o": ("o", nn.Identity())}, {}, old.attention_head_size, scale)
        changes.exchange(layer.crossattention, "self", new, [name for name, _ in parts.values()])
        changes.set(layer.crossattention, "forward", _looking(layer.crossattention))


class Blip:
    """See CrossInputs."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._decoder = model.text_decoder
        self._attentions: list[Any] = [layer.crossattention.self for layer in self._decoder.bert.encoder.layer]

    def encode(self, items: Sequence[EncodeItem]) -> list[Tensor]:
        """Return keys and values of every image's states in all layers."""
        weight = self._model.get_input_embeddings().weight
        pixels = [item.features["pixel_values"].to(weight.device, weight.dtype) for item in items]
        states = [self._model.vision_model(pixel_values=each).last_hidden_state[0] for each in pixels]
        return [keys_and_values(self._attentions, states_EH) for states_EH in states]

    def cross_views(self, spans: Sequence[SpanView], num_prompt: int) -> tuple[CrossView, ...]:
        """Return the view in which every position attends to the image, whose token comes first."""
        return tuple(CrossView(0, None, span.num_states) for span in spans)

    def hidden(self, embeds_TH: Tensor, positions: Tensor) -> Tensor:
        """Return last hidden states, after the layer that stands before the head's matrix."""
        bert = self._decoder.bert
        placed_TH = embeds_TH + bert.embeddings.position_embeddings(positions[0])
        hidden_1TH = bert.embeddings.LayerNorm(placed_TH).unsqueeze(0)
        for layer in bert.encoder.layer:
            # The layer only tests whether there are states.
            hidden_1TH = layer(hidden_1TH, encoder_hidden_states=True)
        hidden_TH: Tensor = self._decoder.cls.predictions.transform(hidden_1TH)[0]
        return hidden_TH


MODEL = FamilyModel(adapt=adapt, cross_inputs=Blip, plain_head=True)
