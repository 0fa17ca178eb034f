"""Phi-4-multimodal: pictures become embeddings inside the module that also puts them into the text.

Its tower looks both ways, as it was trained. transformers' fused attention takes it for causal where no picture of a
call is padded (its eager attention does not), so that a picture would change with its company.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def adapt(model: Any) -> None:
    """Say of the tower's attention that it looks both ways."""
    for layer in model.model.embed_tokens_extend.image_embed.img_processor.encoder.layers:
        layer.self_attn.is_causal = False


def image_features(model: Any, image_pixel_values: Tensor, image_sizes: Tensor, image_attention_mask: Tensor) -> Tensor:
    """Embeddings (sum of E, H) of pictures: that module, given a text of pictures alone.

    Args:
        image_pixel_values: (pictures, 1 + tiles, channels, height, width), the whole picture first.
        image_sizes: of all tiles together, in pixels.
        image_attention_mask: (pictures, 1 + tiles, rows, columns), patches that show something.
    """
    embed, config = model.model.embed_tokens_extend.image_embed, model.config
    mask = image_attention_mask.bool()
    count = sum(_num_embeds(embed, own, size) for own, size in zip(mask, image_sizes.view(-1, 2).tolist(), strict=True))
    ids = torch.full((1, count), config.vision_config.image_token_id, device=mask.device)
    blank = model.get_input_embeddings().weight.new_zeros((1, count, config.hidden_size))
    made: Tensor = embed(
        ids,
        blank,
        image_pixel_values=image_pixel_values,
        image_sizes=image_sizes,
        image_attention_mask=mask,
    )
    return made[0]


def _num_embeds(embed: Any, mask: Tensor, size: list[int]) -> int:
    """Rows of the tiles' useful part and of the whole picture, each ended by one more, and one between the two.

    Two by two patches make one embedding.
    """
    side = int(embed.num_img_tokens**0.5)
    high, wide = size[0] // embed.crop_size, size[1] // embed.crop_size
    tiles = mask[1 : 1 + high * wide, ::2, ::2].reshape(high, wide, side, side)
    rows, columns = int(tiles[:, 0, :, 0].sum()), int(tiles[0, :, 0].sum())
    return rows * (columns + 1) + 1 + side * (side + 1)
