"""DeepSeek-OCR's model: SAM's tower, CLIP's layers over its result, and the text of DeepSeek-OCR-2.

Shapes: N views, S width of SAM's result and of CLIP, P patches of a view, H hidden size, E embeddings of an image.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import CLIPVisionConfig
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Chunk, WeightConverter, WeightRenaming
from transformers.models.clip.modeling_clip import CLIPEncoderLayer, CLIPPreTrainedModel
from transformers.models.deepseek_ocr2.modeling_deepseek_ocr2 import DeepseekOcr2SamVisionEncoder

from beheld.families._shared.deepseek.modeling import EXPERTS, ViewsForCausalLM, ViewsModel
from beheld.families.deepseek_ocr.config import DeepseekOCRConfig

_SAM = "model.sam_model"
# The published name, or a part of it -> ours; applied in this order.
_NAMES = {
    r"^model\.(embed_tokens|layers|norm)\.": r"model.language_model.\1.",
    r"^model\.sam_model\.blocks\.(\d+)\.norm1\.": rf"{_SAM}.layers.\1.layer_norm1.",
    r"^model\.sam_model\.blocks\.(\d+)\.norm2\.": rf"{_SAM}.layers.\1.layer_norm2.",
    r"^model\.sam_model\.blocks\.": f"{_SAM}.layers.",
    r"^model\.sam_model\.patch_embed\.proj\.": f"{_SAM}.patch_embed.projection.",
    r"^model\.sam_model\.neck\.0\.": f"{_SAM}.neck.conv1.",
    r"^model\.sam_model\.neck\.1\.": f"{_SAM}.neck.layer_norm1.",
    r"^model\.sam_model\.neck\.2\.": f"{_SAM}.neck.conv2.",
    r"^model\.sam_model\.neck\.3\.": f"{_SAM}.neck.layer_norm2.",
    r"^model\.sam_model\.net_2\.": f"{_SAM}.proj.conv1.",
    r"^model\.sam_model\.net_3\.": f"{_SAM}.proj.conv2.",
}
_QKV = ("q_proj", "k_proj", "v_proj")


class DeepseekOCREmbeddings(nn.Module):
    """CLIP's class and positions, the latter resized to the grid of the given features."""

    def __init__(self, config: CLIPVisionConfig) -> None:
        super().__init__()
        side, patch = config.image_size, config.patch_size
        assert isinstance(side, int)
        assert isinstance(patch, int)
        self.side = side // patch
        self.class_embedding = nn.Parameter(torch.zeros(config.hidden_size))
        self.position_embedding = nn.Embedding(1 + self.side**2, config.hidden_size)

    def forward(self, features: Tensor) -> Tensor:
        """Return (N, 1 + P, S) of features (N, S, rows, columns)."""
        x_NPS = features.flatten(2).transpose(1, 2)
        first = self.class_embedding.expand(len(x_NPS), 1, -1)
        return torch.cat((first, x_NPS), dim=1) + self._positions(features.shape[-1])

    def _positions(self, side: int) -> Tensor:
        stored: Tensor = self.position_embedding.weight
        if side == self.side:
            return stored
        grid = stored[1:].unflatten(0, (self.side, self.side)).permute(2, 0, 1)[None].to(torch.float32)
        sized = F.interpolate(grid, (side, side), mode="bicubic", antialias=True, align_corners=False)
        return torch.cat((stored[:1], sized[0].flatten(1).t().to(stored.dtype)))


class DeepseekOCRLayers(nn.Module):
    """CLIP's layers under their published name."""

    def __init__(self, config: CLIPVisionConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(CLIPEncoderLayer(config) for _ in range(config.num_hidden_layers))


class DeepseekOCRClip(CLIPPreTrainedModel):
    """CLIP's tower over the features of another, without its norm at the end."""

    def __init__(self, config: CLIPVisionConfig) -> None:
        super().__init__(config)
        self.embeddings = DeepseekOCREmbeddings(config)
        self.pre_layrnorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.transformer = DeepseekOCRLayers(config)

    def forward(self, features: Tensor) -> Tensor:
        """Return the patches' features (N, P, S) of features (N, S, rows, columns)."""
        x_NPS = self.pre_layrnorm(self.embeddings(features))
        for layer in self.transformer.layers:
            x_NPS = layer(x_NPS, attention_mask=None)
        return x_NPS[:, 1:]


class DeepseekOCRProjector(nn.Module):
    """The projector under its published name."""

    def __init__(self, config: DeepseekOCRConfig) -> None:
        super().__init__()
        settings = config.projector_config
        self.layers = nn.Linear(settings["input_dim"], settings["n_embed"])

    def forward(self, features: Tensor) -> Tensor:
        """Return the embeddings (N, P, H) of features (N, P, 2 S)."""
        embeds: Tensor = self.layers(features)
        return embeds


class DeepseekOCRModel(ViewsModel):
    """Towers, projector and text model."""

    config_class = DeepseekOCRConfig

    def __init__(self, config: DeepseekOCRConfig) -> None:
        super().__init__(config)
        # Its attention adds positions to the scores, which the attention interface does not know.
        sam = copy.deepcopy(config.vision_config.sam_config)
        sam._attn_implementation = "sdpa"
        self.sam_model = DeepseekOcr2SamVisionEncoder(sam)
        self.vision_model = DeepseekOCRClip(config.vision_config.clip_config)
        self.projector = DeepseekOCRProjector(config)
        self.post_init()

    def views(self, pixels: Tensor) -> Tensor:
        """Return the embeddings of views; see ViewsModel."""
        features = self.sam_model(pixels.to(self.image_newline.dtype)).last_hidden_state
        both = torch.cat((self.vision_model(features), features.flatten(2).transpose(1, 2)), dim=-1)
        embeds: Tensor = self.projector(both)
        return embeds

    def joined(self, overview: Tensor, tiles: Tensor) -> Tensor:
        """Return the tiles, the overview, the separator."""
        return torch.cat((tiles, overview, self.view_seperator[None]))


class DeepseekOCRForCausalLM(ViewsForCausalLM):
    """The model with its head."""

    config_class = DeepseekOCRConfig
    inner = DeepseekOCRModel
    # CLIP's own patches, in whose place SAM's features stand.
    _keys_to_ignore_on_load_unexpected = [  # noqa: RUF012
        r"^model\.vision_model\.embeddings\.(patch_embedding|position_ids)"
    ]


register_checkpoint_conversion_mapping(
    DeepseekOCRForCausalLM.__name__,
    [
        *(WeightRenaming(theirs, ours) for theirs, ours in _NAMES.items()),
        WeightConverter("self_attn.qkv_proj", [f"self_attn.{name}" for name in _QKV], [Chunk(dim=0)]),
        *EXPERTS,
    ],
    overwrite=True,
)
