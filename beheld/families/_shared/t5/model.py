"""T5's decoder: scores have a learned bias by the distance of two positions, which the first layer holds for all.

Shapes: T tokens of the step, S size of a state, H heads, D distances.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from beheld.families._shared.encoder_decoder import EncoderDecoder
from beheld.models.cross import CrossAttention
from beheld.models.surgery.operation import Changes


class _Cross(CrossAttention):
    """Cross-attention in a layer that also expects a bias and weights of it."""

    def forward(self, hidden_states: Tensor, **unused: Any) -> tuple[Tensor, None, None]:  # type: ignore[override]
        """See CrossAttention."""
        return *super().forward(hidden_states), None


class T5Decoder(EncoderDecoder):
    """See EncoderDecoder.

    Attributes:
        listed: the decoder's name of its layers.
    """

    norm = "final_layer_norm"
    inputs = ("q", "k", "v")
    output = "o"
    crossing = "EncDecAttention"
    attention = _Cross
    listed: ClassVar[str] = "block"

    @classmethod
    def decoder(cls, model: Any) -> Any:
        """Return the module that holds the decoder's layers."""
        return model.decoder

    @classmethod
    def encoder(cls, model: Any) -> Any:
        """Return the encoder."""
        return model.encoder

    @classmethod
    def attending(cls, layer: Any) -> Any:
        """See EncoderDecoder."""
        return layer.layer[0].SelfAttention

    @classmethod
    def holder(cls, layer: Any) -> Any:
        """See EncoderDecoder."""
        return layer.layer[1]

    @classmethod
    def measures(cls, attention: Any) -> tuple[int, float]:
        """Return the size of a head, and the scale: scores are taken as they are."""
        return attention.key_value_proj_dim, 1.0

    @classmethod
    def adapt(cls, model: Any, changes: Changes) -> None:
        """List the layers under the usual name as well; see EncoderDecoder."""
        decoder = cls.decoder(model)
        changes.set(decoder, "layers", getattr(decoder, cls.listed))
        super().adapt(model, changes)

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._buckets_D: Tensor | None = None

    def begin(self, embeds_1TS: Tensor, positions_T: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """Look up the bias (H, D) of a query and a key at most D - 1 positions before it; farther ones have the last.

        Positions have no embedding.
        """
        # The first layer holds the biases of all, one for each head and bucket of distances.
        attention = self.attending(self._decoder.layers[0])
        weight: Tensor = attention.relative_attention_bias.weight
        if self._buckets_D is None or self._buckets_D.device != weight.device:
            self._buckets_D = buckets_of_distances(attention, weight.device)
        return embeds_1TS, {"position_bias": weight[self._buckets_D].T}


def buckets_of_distances(attention: Any, device: torch.device) -> Tensor:
    """Return the bucket of each distance, (D)."""
    most: int = attention.relative_attention_max_distance
    found_D: Tensor = attention._relative_position_bucket(
        -torch.arange(most + 1, device=device),
        bidirectional=False,
        num_buckets=attention.relative_attention_num_buckets,
        max_distance=most,
    )
    return found_D
