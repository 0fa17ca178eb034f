"""Encoder-decoders: an encoder reads an item once, and every decoder layer attends to its states.

A family says what is its own: how states are made, what stands before the decoder's layers, and how its modules are
called. What the engine keeps of an item is keys and values, computed when it is encoded.

Shapes: T tokens of the step, E states of an item, S size of a state.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from beheld.attention import hook
from beheld.attention.cross import CrossView
from beheld.attention.op import attend_layer
from beheld.core.errors import StepError
from beheld.core.plan import EncodeItem, SpanView
from beheld.models.cross import CrossAttention, keys_and_values
from beheld.models.surgery.operation import Changes

# Decoder layers only test whether there are states; our attention finds the states itself.
_SOME = True


def alike(items: Sequence[EncodeItem]) -> list[list[int]]:
    """Return the numbers of items whose features have the same shapes, in groups."""
    groups: dict[Any, list[int]] = {}
    for number, item in enumerate(items):
        single = all(value.dim() and len(value) == 1 for value in item.features.values())
        shapes = tuple(sorted((name, value.shape, value.dtype) for name, value in item.features.items()))
        groups.setdefault(shapes if single else number, []).append(number)
    return list(groups.values())


class SelfAttention(nn.Module):
    """Takes the place of self-attention with BART's names that calls no AttentionInterface.

    Args:
        layer: the index of the decoder's layer.
        old: the module that it replaces.
    """

    def __init__(self, layer: int, old: Any) -> None:
        super().__init__()
        self.layer_idx = layer
        self._head_dim: int = old.head_dim
        self._scale: float = old.scaling
        self._inputs, self._output = ("q_proj", "k_proj", "v_proj"), "out_proj"
        for name in (*self._inputs, self._output):
            self.add_module(name, getattr(old, name))

    def forward(self, hidden_states: Tensor, **unused: Any) -> tuple[Tensor, None]:
        """Attend (1, T, S) -> (1, T, S) to the sequences' known positions."""
        query, key, value = (
            getattr(self, name)(hidden_states).unflatten(-1, (-1, self._head_dim)).transpose(1, 2)
            for name in self._inputs
        )
        out_1THC = attend_layer(self.layer_idx, query, key, value, None, self._scale, None)
        out: Tensor = getattr(self, self._output)(out_1THC.flatten(-2))
        return out, None


class EncoderDecoder:
    """See CrossInputs; a family's subclass gives what it leaves open.

    Attributes:
        norm: the decoder's module after its layers; empty if there is none.
        output: the name of the last projection of the layers' cross-attention.
        crossing: the name of that cross-attention in a layer.
        inputs: the names of its projections to queries, keys and values.
        attention: what takes its place.
    """

    norm: ClassVar[str] = "layer_norm"
    output: ClassVar[str] = "out_proj"
    crossing: ClassVar[str] = "encoder_attn"
    inputs: ClassVar[tuple[str, str, str]] = ("q_proj", "k_proj", "v_proj")
    attention: ClassVar[type[CrossAttention]] = CrossAttention

    def __init__(self, model: Any) -> None:
        self._model = model
        self._decoder = self.decoder(model)
        self._layers: list[Any] = [getattr(self.holder(layer), self.crossing) for layer in self._decoder.layers]

    @classmethod
    def decoder(cls, model: Any) -> Any:
        """Return the module that holds the decoder's layers."""
        return model.model.decoder

    def states(self, items: Sequence[EncodeItem]) -> Sequence[Tensor]:
        """Return the encoder's states (E, S) of each item, whose features are its arguments.

        Features have a first dimension of 1. Items of the same shapes are computed together, each attending to itself.

        Raises:
            StepError: an item does not fit the encoder.
        """
        found: dict[int, Tensor] = {}
        for numbers in alike(items):
            made_IES = self.encoder(self._model)(**self.joined([items[n].features for n in numbers])).last_hidden_state
            for number, states_ES in zip(numbers, made_IES, strict=True):
                count = items[number].num_embeds
                if len(states_ES) < count:
                    raise StepError(f"the encoder makes {len(states_ES)} states of it; {count} were expected.")
                # Further states are those of the silence that pads the features; nothing attends to them.
                found[number] = self.projected(states_ES[:count])
        return [found[number] for number in range(len(items))]

    def joined(self, features: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Return the encoder's arguments for several items."""
        weight = self._model.get_input_embeddings().weight
        joined = features[0]
        if len(features) > 1:
            joined = {name: torch.cat([each[name] for each in features]) for name in joined}
        return {
            name: value.to(weight.device, weight.dtype if value.is_floating_point() else None)
            for name, value in joined.items()
        }

    @classmethod
    def attending(cls, layer: Any) -> Any:
        """Return a decoder layer's self-attention."""
        return layer.self_attn

    @classmethod
    def holder(cls, layer: Any) -> Any:
        """Return the module that holds a decoder layer's cross-attention."""
        return layer

    @classmethod
    def measures(cls, attention: Any) -> tuple[int, float]:
        """Return the size of a head of cross-attention, and the scale of its scores."""
        return attention.head_dim, attention.scaling

    @classmethod
    def encoder(cls, model: Any) -> Any:
        """Return the encoder."""
        return model.model.encoder

    def projected(self, states_ES: Tensor) -> Tensor:
        """Return what the decoder makes of the encoder's states before its layers attend to them."""
        return states_ES

    def begin(self, embeds_1TS: Tensor, positions_T: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """Return what enters the first layer, (1, T, S), and keyword arguments of all layers."""
        raise NotImplementedError

    # ------------------------------------------------------------------ the same for all

    @classmethod
    def exchanges(cls, decoder: Any) -> bool:
        """Return whether self-attention, too, is exchanged, because it calls no AttentionInterface."""
        return False

    @classmethod
    def adapt(cls, model: Any, changes: Changes) -> None:
        """Direct the decoder's self-attention to our hook and exchange its cross-attention; the encoder stays."""
        decoder = cls.decoder(model)
        config = copy.deepcopy(decoder.config)
        config._attn_implementation = hook.register()
        for index, layer in enumerate(decoder.layers):
            own = cls.attending(layer)
            if cls.exchanges(decoder):
                new_own = SelfAttention(index, own)
                changes.exchange(layer, "self_attn", new_own, [name for name, _ in new_own.named_children()])
            else:
                changes.set(own, "config", config)
            old = getattr(cls.holder(layer), cls.crossing)
            projections = {
                kind: (each, getattr(old, each)) for kind, each in zip("qkvo", (*cls.inputs, cls.output), strict=True)
            }
            new = cls.attention(index, projections, {}, *cls.measures(old))
            changes.exchange(cls.holder(layer), cls.crossing, new, [name for name, _ in new.named_children()])

    def encode(self, items: Sequence[EncodeItem]) -> list[Tensor]:
        """Return keys and values of each item in all layers."""
        return [keys_and_values(self._layers, states_ES) for states_ES in self.states(items)]

    def cross_views(self, spans: Sequence[SpanView], num_prompt: int) -> tuple[CrossView, ...]:
        """Return views in which every position attends to the whole item."""
        return tuple(CrossView(0, None, span.num_states) for span in spans)

    def hidden(self, embeds_TH: Tensor, positions: Tensor) -> Tensor:
        """Return last hidden states (T, S) of the decoder, whose tokens belong to several sequences."""
        hidden_1TS, keywords = self.begin(embeds_TH.unsqueeze(0), positions[0])
        for layer in self._decoder.layers:
            made = layer(hidden_1TS, encoder_hidden_states=_SOME, use_cache=False, **keywords)
            hidden_1TS = made[0] if isinstance(made, tuple) else made
        if self.norm:
            hidden_1TS = getattr(self._decoder, self.norm)(hidden_1TS)
        hidden_TS: Tensor = hidden_1TS[0]
        return hidden_TS
