"""T5Gemma 2: a decoder layer's only attention is to known positions and to the encoder's states, by one softmax.

Shapes: T tokens of the step, E positions of an encoder's prompt, S size of a state, H heads, K key-value heads, C head
size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.models.t5gemma2.modeling_t5gemma2 import apply_rotary_pos_emb

from beheld.attention.op import attend_merged
from beheld.core.plan import EncodeItem
from beheld.families._shared.encoder_decoder import EncoderDecoder, alike
from beheld.families.model import FamilyModel
from beheld.models.cross import CrossAttention
from beheld.models.surgery.operation import Changes


class _Merged(CrossAttention):
    """Takes the place of T5Gemma2MergedAttention, whose projections serve states and positions alike.

    Args:
        old: the module that it replaces.
    """

    def __init__(self, index: int, old: Any) -> None:
        projections = {kind: (f"{kind}_proj", getattr(old, f"{kind}_proj")) for kind in "qkvo"}
        norms = {kind: (f"{kind}_norm", getattr(old, f"{kind}_norm")) for kind in "qk"}
        super().__init__(index, projections, norms, old.head_dim, old.scaling)
        self._kind: str = old.layer_type
        self._window: int | None = old.sliding_window

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, position_embeddings: Mapping[str, tuple[Tensor, Tensor]], **unused: Any
    ) -> tuple[Tensor, None, None]:
        """Attend (1, T, S) -> (1, T, S). States are at no position: only the answer's keys are rotated.

        Args:
            position_embeddings: kind of layer -> cosines and sines of each token's position.
        """
        query, key, value = (self._heads(kind, hidden_states).transpose(1, 2) for kind in "qkv")
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings[self._kind])
        out_1THC = attend_merged(self.layer, query, key, value, self._window, self.scale)
        out: Tensor = getattr(self, self._projections["o"])(out_1THC.flatten(-2))
        return out, None, None


class T5Gemma2(EncoderDecoder):
    """See EncoderDecoder."""

    norm = "norm"
    # A layer's only attention.
    crossing = "self_attn"

    @classmethod
    def adapt(cls, model: Any, changes: Changes) -> None:
        """Exchange the layers' attention; tokens of the answer have the decoder's table."""
        decoder = cls.decoder(model)
        changes.set(model, "get_input_embeddings", lambda: decoder.embed_tokens)
        for index, layer in enumerate(decoder.layers):
            new = _Merged(index, layer.self_attn)
            changes.exchange(layer, "self_attn", new, [name for name, _ in new.named_children()])

    def states(self, items: Sequence[EncodeItem]) -> Sequence[Tensor]:
        """Return the states (E, S) of whole prompts."""
        found: dict[int, Tensor] = {}
        for numbers in alike(items):
            given = self.joined([items[number].features for number in numbers])
            mask_IE = torch.ones_like(given["input_ids"])
            made_IES = self.encoder(self._model)(**given, attention_mask=mask_IE).last_hidden_state
            found |= dict(zip(numbers, made_IES, strict=True))
        return [found[number] for number in range(len(items))]

    def begin(self, embeds_1TS: Tensor, positions_T: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """Compute the rotation of each position for every kind of layer."""
        decoder = self._decoder
        kinds = sorted(set(decoder.config.layer_types))
        places = positions_T.unsqueeze(0)
        return embeds_1TS, {
            "position_embeddings": {kind: decoder.rotary_emb(embeds_1TS, places, kind) for kind in kinds}
        }


MODEL = FamilyModel(adapt=T5Gemma2.adapt, cross_inputs=T5Gemma2, plain_head=True)
