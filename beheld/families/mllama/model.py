"""Llama 3.2 Vision: some layers attend to image tiles instead of the text.

Shapes: T tokens of the step, E states of one image, S size of a state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from beheld.attention.context import current
from beheld.attention.cross import CrossView
from beheld.core.errors import StepError
from beheld.core.plan import EncodeItem, SpanView
from beheld.families.model import FamilyModel
from beheld.models import tower_calls
from beheld.models.cross import CrossAttention, crosses, keys_and_values
from beheld.models.surgery.operation import Changes


def adapt(model: Any, changes: Changes) -> None:
    """Put our attention into the cross-attention layers."""
    for layer in model.model.language_model.layers:
        old = getattr(layer, "cross_attn", None)
        if old is not None:
            new = CrossAttention(
                layer.layer_idx,
                {kind: (f"{kind}_proj", getattr(old, f"{kind}_proj")) for kind in "qkvo"},
                {kind: (f"{kind}_norm", getattr(old, f"{kind}_norm")) for kind in "qk"},
                old.head_dim,
                old.scaling,
            )
            changes.exchange(layer, "cross_attn", new, [name for name, _ in new.named_children()])


class Mllama:
    """See CrossInputs."""

    def __init__(self, model: Any) -> None:
        self._model = model
        layers: nn.ModuleList = model.model.language_model.layers
        self._layers: list[Any] = [layer.cross_attn for layer in layers if crosses(layer)]
        vision = model.config.vision_config
        self._patches = (vision.image_size // vision.patch_size) ** 2 + 1
        self._tiles: int = vision.max_num_tiles

    def encode(self, items: Sequence[EncodeItem]) -> list[Tensor]:
        """Return keys and values of every tile, including empty ones, which tokens before the first image attend to.

        Raises:
            StepError: an image was prepared for another number of tiles than the checkpoint's.
        """
        for item in items:
            tiles = item.features["pixel_values"].shape[2]
            if tiles != self._tiles:
                # Its grid index refers to another list. An index beyond a table's end would destroy a GPU's context.
                raise StepError(f"it was cut for {tiles} tiles (max_image_tiles), but the tower takes {self._tiles}.")
        core, weight = self._model.model, self._model.get_input_embeddings().weight
        out: list[Tensor | None] = [None] * len(items)
        for _, indices, options in tower_calls.combine(items):
            moved = {name: value.to(weight.device, non_blocking=True) for name, value in options.items()}
            moved["pixel_values"] = moved["pixel_values"].to(weight.dtype)
            seen = core.vision_model(**moved).last_hidden_state
            for index, states in zip(indices, core.multi_modal_projector(seen), strict=True):
                out[index] = keys_and_values(self._layers, states.reshape(-1, states.shape[-1]))
        return [tensor for tensor in out if tensor is not None]

    def cross_views(self, spans: Sequence[SpanView], num_prompt: int) -> tuple[CrossView, ...]:
        """Return views: an image is visible from its token to the next image's, the last image to the end.

        Images with adjacent tokens are visible together:

            tokens     t  A  B  t  t  C  t ..
            A             .............              B  from its token, C  to the end
        """
        stops: list[int | None] = []
        for index in reversed(range(len(spans))):
            following = spans[index + 1].start if index + 1 < len(spans) else None
            if following is not None and following == spans[index].start + 1:
                stops.append(stops[-1])
            else:
                stops.append(following)
        stops.reverse()
        return tuple(
            CrossView(span.start, stop, int(span.layout["num_tiles"][0]) * self._patches)
            for span, stop in zip(spans, stops, strict=True)
        )

    def hidden(self, embeds_TH: Tensor, positions: Tensor) -> Tensor:
        """Return last hidden states. If no sequence of the step has images, the layers are skipped, as in transformers.

        Tokens of other sequences pass the layers unchanged: their attention is zero, and `sighted_T` masks what
        follows.
        """
        beside = current().cross
        told: dict[str, Any] = {}
        if beside is not None:
            sighted_T = beside.metadata.sighted_T.to(embeds_TH.dtype)
            told["full_text_row_masked_out_mask"] = sighted_T[None, None, :, None]
            # The model only tests whether there are any.
            told["cross_attention_states"] = embeds_TH.new_empty(0)
        output = self._model.model.language_model(
            inputs_embeds=embeds_TH.unsqueeze(0), position_ids=positions, use_cache=False, **told
        )
        hidden_TH: Tensor = output.last_hidden_state[0]
        return hidden_TH


MODEL = FamilyModel(adapt=adapt, cross_inputs=Mllama, plain_head=True)
