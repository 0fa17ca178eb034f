"""Phi-4-multimodal: the modules that compute media embeddings also insert them into the text.

Its image tower was trained with attention in both directions. transformers' fused attention treats it as causal if no
image of a call is padded (its eager attention does not), so an image's embeddings would depend on the other images.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from beheld.core.plan import EncodeItem
from beheld.families.model import FamilyModel, TowerCall
from beheld.models import tower_calls
from beheld.models.disabled_towers import DisabledTower
from beheld.models.surgery.operation import Changes

# Weight names in the main revision of microsoft/Phi-4-multimodal-instruct, and in transformers' class.
_RENAMED = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (r"\.base_layer\.", "."),
        (r"(\.image_embed\.)img_projection\.0\.", r"\1img_projection_up."),
        (r"(\.image_embed\.)img_projection\.2\.", r"\1img_projection_down."),
        (r"(\.image_embed\.)glb_GN$", r"\1global_img_feature_extensor"),
        (r"(\.image_embed\.)sub_GN$", r"\1sub_img_feature_extensor"),
        (r"(\.audio_embed\.)audio_projection\.speech\.0\.", r"\1up_proj_for_speech."),
        (r"(\.audio_embed\.)audio_projection\.speech\.2\.", r"\1down_proj_for_speech."),
        (r"(\.audio_embed\.)audio_projection\.vision\.0\.", r"\1up_proj_for_vision_speech."),
        (r"(\.audio_embed\.)audio_projection\.vision\.2\.", r"\1down_proj_for_vision_speech."),
        (r"(\.encoders\.\d+\.feed_forward_(?:in|out)\.)net\.0\.linear\.", r"\1gate_up_proj."),
        (r"(\.encoders\.\d+\.feed_forward_(?:in|out)\.)net\.2\.", r"\1down_proj."),
        (r"(\.encoders\.\d+\.self_attn\.)linear_([qkv])\.", r"\1\2_proj."),
        (r"(\.encoders\.\d+\.self_attn\.)linear_out\.", r"\1o_proj."),
    )
)
# Positions that the audio tower reads at once: forty seconds.
_WINDOW = 500
_ADAPTER = re.compile(r"\.lora_[AB]\.(vision|speech)\.weight$")


def renamed(weights: Mapping[str, Tensor], raw: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the weights of the main revision under transformers' names.

    Its adapter weights are left out: the folders vision-lora and speech-lora hold the same, see checkpoint/adapters.py,
    which refuses a checkpoint without them.
    """
    made: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if _ADAPTER.search(name):
            continue
        new = name
        for pattern, replacement in _RENAMED:
            new = pattern.sub(replacement, new)
        made[new] = weight
    return made


def combine(items: Sequence[EncodeItem]) -> list[TowerCall]:
    """Combine by the default rule; audio next to images is separate from other audio."""
    calls: list[TowerCall] = []
    for projection in ("", "speech", "vision_speech"):
        mine = [index for index, item in enumerate(items) if _projection(item) == projection]
        for modality, indices, options in tower_calls.combine([items[index] for index in mine]):
            if projection:
                options = {"audio_input_features": options["audio_input_features"], "projection": projection}
            calls.append((modality, [mine[index] for index in indices], options))
    return calls


def _projection(item: EncodeItem) -> str:
    """Return the name of an audio item's projection; "" for other media."""
    next_to_images = item.features.get("next_to_images")
    if next_to_images is None:
        return ""
    return "vision_speech" if bool(next_to_images) else "speech"


def audio_features(model: Any, audio_input_features: Tensor, projection: str) -> Tensor:
    """Return embeddings (sum of E, H) of audio items of one length: the tower without a mask, as for a lone item.

    The mask that its processor makes for items of different lengths is added to attention scores as 1 and 0, so the
    tower would also read padding after a shorter item. Audio longer than a window is cut into several windows, which
    the tower can do for one item at a time.

    Args:
        model: Phi4MultimodalForCausalLM.
        audio_input_features: (items, frames, mel bins).
        projection: "speech", or "vision_speech" next to images.
    """
    embed = model.model.embed_tokens_extend.audio_embed
    up, down = (getattr(embed, f"{way}_proj_for_{projection}") for way in ("up", "down"))
    tower = embed.encoder
    long = audio_input_features.shape[1] > _WINDOW * tower.config.time_reduction
    parts = audio_input_features.split(1 if long else len(audio_input_features))
    features = torch.cat([tower(part, None) for part in parts])
    made: Tensor = down(torch.nn.functional.gelu(up(features)))
    return made.flatten(0, 1)


def adapt(model: Any, changes: Changes) -> None:
    """Let image attention run both ways, and shorten the mask of audio attention."""
    extend = model.model.embed_tokens_extend
    if not isinstance(extend.image_embed, DisabledTower):
        for layer in extend.image_embed.img_processor.encoder.layers:
            changes.set(layer.self_attn, "is_causal", False)
    if not isinstance(extend.audio_embed, DisabledTower):
        _see_all(extend.audio_embed.encoder, changes)


def _see_all(tower: Any, changes: Changes) -> None:
    """Return one true value instead of all pairs, if an audio tower has no chunks and every position sees all.

    transformers writes out all pairs of a whole item, several times, before it cuts it into windows: twenty minutes
    took 0.9 GiB, which grows with the square of the length.
    """
    if tower.config.chunk_size > 0:
        return

    def seen(seq_len: int, batch_size: int, chunk_size: int, left_chunk: int) -> Tensor:
        true = torch.ones((1, 1, 1), dtype=torch.bool, device=next(tower.parameters()).device)
        return true.expand(batch_size, seq_len, seq_len)

    changes.set(tower, "_streaming_mask", seen)


def image_features(model: Any, image_pixel_values: Tensor, image_sizes: Tensor, image_attention_mask: Tensor) -> Tensor:
    """Return embeddings (sum of E, H) of images, by running the module on a text of image placeholders.

    Args:
        image_pixel_values: (images, 1 + tiles, channels, height, width), the whole image first.
        image_sizes: of all tiles together, in pixels.
        image_attention_mask: (images, 1 + tiles, rows, columns), true for patches inside the image.
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
    """Count the embeddings: one per patch and row of the tiles and of the whole image, and one between the two.

    Two by two patches make one embedding.
    """
    side = int(embed.num_img_tokens**0.5)
    high, wide = size[0] // embed.crop_size, size[1] // embed.crop_size
    tiles = mask[1 : 1 + high * wide, ::2, ::2].reshape(high, wide, side, side)
    rows, columns = int(tiles[:, 0, :, 0].sum()), int(tiles[0, :, 0].sum())
    return rows * (columns + 1) + 1 + side * (side + 1)


MODEL = FamilyModel(
    adapt=adapt,
    combine=combine,
    audio_features=audio_features,
    image_features=image_features,
    renamed=renamed,
    towers={"image": ("model.embed_tokens_extend.image_embed",), "audio": ("model.embed_tokens_extend.audio_embed",)},
)
