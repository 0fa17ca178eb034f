"""Florence-2: BART's encoder reads image and prompt, and every decoder layer attends to the encoder's states.

Shapes: T tokens of the step, E positions of an encoder's prompt, S size of a state.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from beheld.core.errors import ModelError, StepError
from beheld.core.plan import EncodeItem
from beheld.families._shared.encoder_decoder import EncoderDecoder
from beheld.families.model import FamilyModel

# Weight names in microsoft/Florence-2-large, and in transformers' class.
_RENAMED = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (r"^language_model\.lm_head\.", "lm_head."),
        (r"^language_model\.model\.", "model.language_model."),
        (r"^image_pos_embed\.", "model.multi_modal_projector.image_position_embed."),
        (r"^image_projection$", "model.multi_modal_projector.image_projection.weight"),
        (r"^(image_proj_norm|visual_temporal_embed)\.", r"model.multi_modal_projector.\1."),
        (r"^vision_tower\.convs\.(\d+)\.proj\.", r"model.vision_tower.convs.\1.conv."),
        (r"^vision_tower\.", "model.vision_tower."),
        (r"\.(conv[12])\.fn\.dw\.", r".\1."),
        (r"\.(window_attn|channel_attn)\.norm\.", ".norm1."),
        (r"\.(window_attn|channel_attn)\.fn\.", r".\1."),
        (r"\.ffn\.norm\.", ".norm2."),
        (r"\.ffn\.fn\.net\.", ".ffn."),
    )
)
_UNUSED = "language_model.final_logits_bias"


def renamed(weights: Mapping[str, Tensor], raw: Mapping[str, Any]) -> dict[str, Tensor] | None:
    """Return the weights of microsoft's layout under transformers' names; None if they have those.

    Raises:
        ModelError: they contain a bias that transformers' class does not add.
    """
    if "image_projection" not in weights:
        return None
    made: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if name == _UNUSED:
            if weight.any():
                raise ModelError(
                    f"The checkpoint's {name} is not zero, but transformers' class ignores it.",
                    "Use another checkpoint.",
                )
            continue
        new = name
        for pattern, replacement in _RENAMED:
            new = pattern.sub(replacement, new)
        # The only weight that is multiplied from the other side.
        made[new] = weight.t().contiguous() if name == "image_projection" else weight
    return made


class Florence2(EncoderDecoder):
    """See EncoderDecoder."""

    norm = ""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._encoder = model.model.language_model.encoder
        self._image_id: int = model.config.image_token_id
        self._vision: Any = model.config.vision_config

    @classmethod
    def decoder(cls, model: Any) -> Any:
        """Return BART's decoder."""
        return model.model.language_model.decoder

    def states(self, items: Sequence[EncodeItem]) -> Sequence[Tensor]:
        """Return the states of whole prompts; images share a call, and so do prompts of one length.

        Raises:
            StepError: an image is larger than the tower's position table.
        """
        for item in items:
            self._check(item)
        weight = self._model.get_input_embeddings().weight
        images = [item.features["pixel_values"] for item in items if "pixel_values" in item.features]
        seen: Tensor | None = None
        if images:
            pixels = torch.cat(images).to(weight.device, weight.dtype)
            seen = self._model.get_image_features(pixel_values=pixels, return_dict=True).pooler_output
        embeds, first = [], 0
        for item in items:
            count = len(item.features["pixel_values"]) if "pixel_values" in item.features else 0
            own = None if seen is None or not count else seen[first : first + count]
            embeds.append(self._embedded(item.features["input_ids"].to(weight.device), own))
            first += count
        out: list[Tensor | None] = [None] * len(items)
        for length in {row.shape[1] for row in embeds}:
            indices = [index for index, row in enumerate(embeds) if row.shape[1] == length]
            states = self._encoder(inputs_embeds=torch.cat([embeds[i] for i in indices])).last_hidden_state
            for index, states_ES in zip(indices, states, strict=True):
                out[index] = states_ES
        return [tensor for tensor in out if tensor is not None]

    def _check(self, item: EncodeItem) -> None:
        """Check sizes on the host; on a GPU, the failure would end all requests."""
        if "pixel_values" not in item.features:
            return
        vision = self._vision
        height, width = item.features["pixel_values"].shape[-2:]
        sides = [height, width]
        for size, stride, padding in zip(vision.patch_size, vision.patch_stride, vision.patch_padding, strict=True):
            sides = [(side + 2 * padding - size) // stride + 1 for side in sides]
        if max(sides) > vision.max_position_embeddings:
            raise StepError(
                f"at {width} x {height} pixels it has {sides[1]} x {sides[0]} patches, but the tower accepts at most "
                f"{vision.max_position_embeddings} per side."
            )

    def _embedded(self, ids_1E: Tensor, images: Tensor | None) -> Tensor:
        """Return embeddings (1, E, S) of a prompt, with image embeddings at its placeholders."""
        places_1E = ids_1E == self._image_id
        # In the first checkpoints' layout, the placeholder's id lies beyond the table.
        embeds: Tensor = self._model.get_input_embeddings()(ids_1E.masked_fill(places_1E, 0))
        if images is not None:
            embeds = embeds.masked_scatter(places_1E[..., None], images.to(embeds.dtype))
        return embeds

    def begin(self, embeds_1TS: Tensor, positions_T: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """Add learned positions, which BART normalizes at once."""
        learned = self._decoder.embed_positions(None, position_ids=positions_T)
        return self._decoder.layernorm_embedding(embeds_1TS + learned), {}


MODEL = FamilyModel(adapt=Florence2.adapt, cross_inputs=Florence2, plain_head=True, renamed=renamed)
