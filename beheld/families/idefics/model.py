"""IDEFICS: gated layers between those of the text attend to the last image before a token.

Shapes: T tokens of the step, H hidden size, E states of one image, S size of a state.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from beheld.attention.context import current
from beheld.attention.cross import CrossView
from beheld.core.plan import EncodeItem, SpanView
from beheld.families.model import FamilyModel
from beheld.models.cross import CrossAttention, keys_and_values
from beheld.models.surgery.operation import Changes


class _Gated(CrossAttention):
    """The attention of a gated layer; zero where no sequence of the step has an image."""

    def forward(self, hidden_states: Tensor, **unused: Any) -> tuple[Tensor, None]:
        """See CrossAttention."""
        if current().cross is None:
            return torch.zeros_like(hidden_states), None
        return super().forward(hidden_states)


def adapt(model: Any, changes: Changes) -> None:
    """Put our attention into the gated layers, and look up added tokens without reading ids back from the device."""
    core = model.model
    for number, layer in enumerate(core.gated_cross_attn_layers):
        old = layer.cross_attn
        new = _Gated(
            number * core.cross_layer_interval,
            {kind: (f"{kind}_proj", getattr(old, f"{kind}_proj")) for kind in "qkvo"},
            {kind: (f"{kind}_layer_norm", getattr(old, f"{kind}_layer_norm")) for kind in "qk"}
            if old.qk_layer_norms
            else {},
            old.head_dim,
            old.scaling,
        )
        changes.exchange(layer, "cross_attn", new, [name for name, _ in new.named_children()])
    table = core.embed_tokens

    def look_up(ids: Tensor) -> Tensor:
        """Return embeddings (.., H); the added tokens' ids follow the others'."""
        added = ids - table.num_embeddings
        plain = F.embedding(ids.clamp(max=table.num_embeddings - 1), table.weight)
        return torch.where(added.unsqueeze(-1) >= 0, table.additional_embedding(added.clamp(min=0)), plain)

    if table.num_additional_embeddings:
        changes.set(table, "forward", look_up)


class Idefics:
    """See CrossInputs."""

    def __init__(self, model: Any) -> None:
        self._model, self._core = model, model.model
        self._attentions: list[Any] = [layer.cross_attn for layer in self._core.gated_cross_attn_layers]

    def encode(self, items: Sequence[EncodeItem]) -> list[Tensor]:
        """Return keys and values of every image's states."""
        weight = self._model.get_input_embeddings().weight
        out = []
        for item in items:
            pixels = item.features["pixel_values"].to(weight.device, weight.dtype)
            states_1ES = self._core.vision_model(pixel_values=pixels).last_hidden_state
            if self._model.config.use_resampler:
                states_1ES = self._core.perceiver_resampler(states_1ES)
            out.append(keys_and_values(self._attentions, states_1ES[0]))
        return out

    def cross_views(self, spans: Sequence[SpanView], num_prompt: int) -> tuple[CrossView, ...]:
        """Return views: an image is visible from its token to the next image's, the last one to the end."""
        stops = [span.start for span in spans[1:]]
        return tuple(
            CrossView(span.start, stop, self._states())
            for span, stop in itertools.zip_longest(spans, stops, fillvalue=None)
            if span is not None
        )

    def _states(self) -> int:
        config = self._model.config
        if config.use_resampler:
            return int(config.perceiver_config.resampler_n_latents)
        return int((config.vision_config.image_size // config.vision_config.patch_size) ** 2 + 1)

    def hidden(self, embeds_TH: Tensor, positions: Tensor) -> Tensor:
        """Return last hidden states. A gate closes the gated layers' attention for tokens that see no image."""
        core, cross, hidden_1TH = self._core, current().cross, embeds_TH.unsqueeze(0)
        gate_1T = embeds_TH.new_zeros((1, len(embeds_TH))) if cross is None else cross.metadata.sighted_T[None]
        for number, layer in enumerate(core.layers):
            gated, rest = divmod(number, core.cross_layer_interval)
            if not rest:
                # The layer only tests whether there are states.
                hidden_1TH = core.gated_cross_attn_layers[gated](
                    hidden_1TH, image_hidden_states=hidden_1TH, cross_attention_gate=gate_1T
                )
            hidden_1TH = layer(hidden_1TH, position_ids=positions)
        hidden_TH: Tensor = core.norm(hidden_1TH)[0]
        return hidden_TH


MODEL = FamilyModel(adapt=adapt, cross_inputs=Idefics, plain_head=True)
