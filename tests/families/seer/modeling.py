"""Seer's model: patches pass one block that looks both ways within an image, and then transformers' Llama.

Shapes: P patches of all images, I images, V width of the tower, H hidden size, E embeddings.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, LlamaModel, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling, CausalLMOutputWithPast

from beheld.families._shared.modeling import CACHE
from tests.families.seer.config import SeerConfig


class SeerTower(nn.Module):
    """Patches with learned positions, one block of attention and MLP, merged two by two."""

    def __init__(self, config: SeerConfig) -> None:
        super().__init__()
        vision, hidden = config.vision_config, config.text_config.hidden_size
        self.num_heads, self.merge = vision.num_heads, vision.merge_size
        self.patch = nn.Linear(3 * vision.patch_size**2, vision.hidden_size)
        self.rows = nn.Embedding(vision.max_side, vision.hidden_size)
        self.columns = nn.Embedding(vision.max_side, vision.hidden_size)
        self.norm = nn.LayerNorm(vision.hidden_size)
        self.qkv = nn.Linear(vision.hidden_size, 3 * vision.hidden_size)
        self.out = nn.Linear(vision.hidden_size, vision.hidden_size)
        self.merger = nn.Linear(vision.hidden_size * vision.merge_size**2, hidden)

    def forward(self, pixel_values: Tensor, image_sizes: Tensor) -> list[Tensor]:
        """(P, pixels), (I, 2) in patches -> (E, H) of each image."""
        sizes = image_sizes.tolist()
        parts = self.patch(pixel_values).split([height * width for height, width in sizes])
        return [self._image(part, *size) for part, size in zip(parts, sizes, strict=True)]

    def _image(self, x_PV: Tensor, height: int, width: int) -> Tensor:
        device = x_PV.device
        rows, columns = torch.arange(height, device=device), torch.arange(width, device=device)
        x_PV = x_PV + (self.rows(rows)[:, None] + self.columns(columns)).flatten(0, 1)
        q, k, v = self.qkv(self.norm(x_PV)).unflatten(-1, (3, self.num_heads, -1)).permute(1, 2, 0, 3)
        seen = F.scaled_dot_product_attention(q[None], k[None], v[None])[0]
        x_PV = x_PV + self.out(seen.transpose(0, 1).flatten(1))
        grid = x_PV.view(height // self.merge, self.merge, width // self.merge, self.merge, -1)
        merged: Tensor = self.merger(grid.permute(0, 2, 1, 3, 4).flatten(2).flatten(0, 1))
        return merged


class SeerPreTrainedModel(PreTrainedModel):
    """What transformers' loader and its attention interface ask of a model."""

    config_class = SeerConfig
    base_model_prefix = "model"
    _supports_sdpa = True
    _supports_attention_backend = True


class SeerModel(SeerPreTrainedModel):
    """Tower and text model."""

    def __init__(self, config: SeerConfig) -> None:
        super().__init__(config)
        self.vision_tower = SeerTower(config)
        self.language_model = LlamaModel(config.text_config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """The text's."""
        return self.language_model.get_input_embeddings()

    def get_image_features(self, pixel_values: Tensor, image_sizes: Tensor, **keywords: Any) -> Any:
        """Embeddings of each image, as `pooler_output`."""
        return BaseModelOutputWithPooling(pooler_output=self.vision_tower(pixel_values, image_sizes))

    def forward(
        self,
        input_ids: Tensor | None = None,
        pixel_values: Tensor | None = None,
        image_sizes: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **keywords: Any,
    ) -> Any:
        """As LlamaModel's, with images in the places of their placeholder."""
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
        if pixel_values is not None:
            seen = torch.cat(self.get_image_features(pixel_values, image_sizes).pooler_output)
            places = (input_ids == self.config.image_token_id)[..., None]
            inputs_embeds = inputs_embeds.masked_scatter(places, seen.to(inputs_embeds))
        return self.language_model(inputs_embeds=inputs_embeds, **keywords)


class SeerForConditionalGeneration(SeerPreTrainedModel, GenerationMixin):
    """The model with its head."""

    def __init__(self, config: SeerConfig) -> None:
        super().__init__(config)
        self.model = SeerModel(config)
        self.lm_head = nn.Linear(config.text_config.hidden_size, config.text_config.vocab_size, bias=False)
        self.post_init()

    def get_image_features(self, pixel_values: Tensor, image_sizes: Tensor, **keywords: Any) -> Any:
        """As SeerModel's."""
        return self.model.get_image_features(pixel_values, image_sizes, **keywords)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        logits_to_keep: Any = 0,
        **keywords: Any,
    ) -> Any:
        """Logits at the positions to keep."""
        keywords.pop("labels", None)
        keywords.pop("return_dict", None)
        out = self.model(input_ids=input_ids, attention_mask=attention_mask, **keywords)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(out.last_hidden_state[:, kept])
        # transformers 5.24 has given the entry its second name.
        cache: dict[str, Any] = {CACHE: getattr(out, CACHE)}
        return CausalLMOutputWithPast(logits=logits, **cache)

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        pixel_values: Tensor | None = None,
        image_sizes: Tensor | None = None,
        is_first_iteration: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Images go in with the prompt alone."""
        made = super().prepare_inputs_for_generation(input_ids, is_first_iteration=is_first_iteration, **kwargs)
        return made | ({"pixel_values": pixel_values, "image_sizes": image_sizes} if is_first_iteration else {})
