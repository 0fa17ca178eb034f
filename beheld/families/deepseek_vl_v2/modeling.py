"""DeepSeek-VL2's model: transformers' SigLIP and the text of DeepSeek-OCR-2, with the published projector.

Shapes: N views, P patches of a view, V width of the tower, H hidden size, E embeddings of an image.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import SiglipVisionModel
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Chunk, WeightConverter, WeightRenaming

from beheld.families._shared.deepseek.modeling import EXPERTS, ViewsForCausalLM, ViewsModel
from beheld.families._shared.modeling import Unbatched
from beheld.families.deepseek_vl_v2.config import DeepseekVLV2Config

_LAYERS = r"model.vision.encoder.layers.\1"
# The published name, or a part of it -> ours; applied in this order.
_NAMES = {
    r"^language\.lm_head\.": "lm_head.",
    r"^language\.model\.": "model.language_model.",
    r"^(image_newline|view_seperator)$": r"model.\1",
    r"^projector\.": "model.projector.",
    r"^vision\.patch_embed\.proj\.": "model.vision.embeddings.patch_embedding.",
    r"^vision\.norm\.": "model.vision.post_layernorm.",
    r"^vision\.attn_pool\.": "model.vision.attn_pool.",
    r"^vision\.blocks\.(\d+)\.norm1\.": f"{_LAYERS}.layer_norm1.",
    r"^vision\.blocks\.(\d+)\.norm2\.": f"{_LAYERS}.layer_norm2.",
    r"^vision\.blocks\.(\d+)\.mlp\.": f"{_LAYERS}.mlp.",
    r"^vision\.blocks\.(\d+)\.attn\.proj\.": f"{_LAYERS}.self_attn.out_proj.",
    r"^vision\.blocks\.(\d+)\.attn\.qkv\.": f"{_LAYERS}.self_attn.qkv.",
}
_QKV = ("q_proj", "k_proj", "v_proj")


class DeepseekVLV2Projector(nn.Module):
    """Squares of patches to one embedding each."""

    def __init__(self, config: DeepseekVLV2Config) -> None:
        super().__init__()
        settings = config.projector_config
        self.ratio: int = settings["downsample_ratio"]
        width, inner = settings["n_embed"], settings["n_embed"] * settings["mlp_ratio"]
        layers: list[nn.Module] = [nn.Linear(settings["input_dim"] * self.ratio**2, inner)]
        for _ in range(1, settings["depth"] - 1):
            layers += [nn.GELU(), nn.Linear(inner, inner)]
        self.layers = nn.Sequential(*layers, nn.GELU(), nn.Linear(inner, width))

    def forward(self, features: Tensor) -> Tensor:
        """Return the embeddings (N, squares, H) of features (N, P, V); zeros fill up the last squares."""
        side = int(features.shape[1] ** 0.5)
        grid = features.unflatten(1, (side, side)).permute(0, 3, 1, 2)
        rest = -side % self.ratio
        squares = F.unfold(F.pad(grid, (0, rest, 0, rest)), kernel_size=self.ratio, stride=self.ratio)
        embeds: Tensor = self.layers(squares.transpose(1, 2))
        return embeds


class DeepseekVLV2Model(ViewsModel):
    """Tower, projector and text model."""

    config_class = DeepseekVLV2Config

    def __init__(self, config: DeepseekVLV2Config) -> None:
        super().__init__(config)
        self.vision = SiglipVisionModel(config.vision_config)
        self.projector = DeepseekVLV2Projector(config)
        self.post_init()

    def views(self, pixels: Tensor) -> Tensor:
        """Return the embeddings of views; see ViewsModel."""
        features = self.vision(pixels.to(self.image_newline.dtype)).last_hidden_state
        embeds: Tensor = self.projector(features)
        return embeds

    def joined(self, overview: Tensor, tiles: Tensor) -> Tensor:
        """Return the overview, the separator, the tiles."""
        return torch.cat((overview, self.view_seperator[None], tiles))


class DeepseekVLV2ForCausalLM(ViewsForCausalLM):
    """The model with its head."""

    config_class = DeepseekVLV2Config
    inner = DeepseekVLV2Model
    # The pooling of the published tower, which no one runs.
    _keys_to_ignore_on_load_unexpected = [r"\.attn_pool\."]  # noqa: RUF012


register_checkpoint_conversion_mapping(
    DeepseekVLV2ForCausalLM.__name__,
    [
        *(WeightRenaming(theirs, ours) for theirs, ours in _NAMES.items()),
        WeightConverter("self_attn.qkv", [f"self_attn.{name}" for name in _QKV], [Chunk(dim=0)]),
        WeightConverter(r"^vision\.pos_embed$", "model.vision.embeddings.position_embedding.weight", [Unbatched()]),
        *EXPERTS,
    ],
    overwrite=True,
)
