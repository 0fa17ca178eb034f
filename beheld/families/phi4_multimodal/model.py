"""Phi-4-multimodal: media become embeddings inside the modules that also put them into the text.

Its tower for images looks both ways, as it was trained. transformers' fused attention takes it for causal where no
image of a call is padded (its eager attention does not), so that an image would change with its company.
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
from beheld.models.surgery.operation import Changes
from beheld.models.towers import DisabledTower

# Names in the main revision of microsoft/Phi-4-multimodal-instruct, and those of transformers' class.
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
# Positions that the tower for audio reads at once: forty seconds.
_WINDOW = 500
_ADAPTER = re.compile(r"\.lora_[AB]\.(vision|speech)\.weight$")


def renamed(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of the main revision under transformers' names.

    The adapters among them are left out: the folders vision-lora and speech-lora hold the same, see
    checkpoint/adapters.py, which refuses a checkpoint without.
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
    """The plain rule; audio next to images apart from audio without."""
    calls: list[TowerCall] = []
    for projection in ("", "speech", "vision_speech"):
        mine = [index for index, item in enumerate(items) if _projection(item) == projection]
        for modality, indices, options in tower_calls.combine([items[index] for index in mine]):
            if projection:
                options = {"audio_input_features": options["audio_input_features"], "projection": projection}
            calls.append((modality, [mine[index] for index in indices], options))
    return calls


def _projection(item: EncodeItem) -> str:
    """Which of the projections of audio an item takes; "" for other media."""
    beside = item.features.get("beside_pictures")
    if beside is None:
        return ""
    return "vision_speech" if bool(beside) else "speech"


def audio_features(model: Any, audio_input_features: Tensor, projection: str) -> Tensor:
    """Embeddings (sum of E, H) of audio items of one length: the tower without a mask, as for a lone one.

    The mask that its processor makes for several items of different lengths is added to the scores of attention as 1
    and 0, so that what lies after a shorter one's end would be read as well. Audio longer than a window is cut into
    several, which the tower can do with one item at a time.

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
    heard = torch.cat([tower(part, None) for part in parts])
    made: Tensor = down(torch.nn.functional.gelu(up(heard)))
    return made.flatten(0, 1)


def adapt(model: Any, changes: Changes) -> None:
    """Let the attention to images look both ways, and say in few words what that to audio sees."""
    extend = model.model.embed_tokens_extend
    if not isinstance(extend.image_embed, DisabledTower):
        for layer in extend.image_embed.img_processor.encoder.layers:
            changes.set(layer.self_attn, "is_causal", False)
    if not isinstance(extend.audio_embed, DisabledTower):
        _see_all(extend.audio_embed.encoder, changes)


def _see_all(tower: Any, changes: Changes) -> None:
    """Where a tower for audio has no chunks, every position sees all: one truth instead of one for each pair.

    transformers writes down all pairs of a whole item, several times, before it cuts it into windows: twenty minutes
    took 0.9 GiB, and that grows with the square of the length.
    """
    if tower.config.chunk_size > 0:
        return

    def seen(seq_len: int, batch_size: int, chunk_size: int, left_chunk: int) -> Tensor:
        true = torch.ones((1, 1, 1), dtype=torch.bool, device=next(tower.parameters()).device)
        return true.expand(batch_size, seq_len, seq_len)

    changes.set(tower, "_streaming_mask", seen)


def image_features(model: Any, image_pixel_values: Tensor, image_sizes: Tensor, image_attention_mask: Tensor) -> Tensor:
    """Embeddings (sum of E, H) of images: that module, given a text of images alone.

    Args:
        image_pixel_values: (images, 1 + tiles, channels, height, width), the whole image first.
        image_sizes: of all tiles together, in pixels.
        image_attention_mask: (images, 1 + tiles, rows, columns), patches that show something.
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
    """Rows of the tiles' useful part and of the whole image, each ended by one more, and one between the two.

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
