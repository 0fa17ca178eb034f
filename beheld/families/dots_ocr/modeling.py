"""dots.ocr's model: a tower of packed images, whose merged patches enter transformers' Qwen2.

Attention and merger are transformers' Qwen2-VL's, under the published names.

Shapes: I images, P patches of all images, X pixels of a patch, V width of the tower, H hidden size, E embeddings.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen2ForCausalLM
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen2_vl.modeling_qwen2_vl import PatchMerger, VisionAttention
from transformers.vision_utils import get_vision_attention_seqlens, get_vision_position_ids

from beheld.families._shared.modeling import with_media
from beheld.families.dots_ocr.config import DotsOCRConfig, DotsVisionConfig

_THETA = 10000.0


class DotsPatches(nn.Module):
    """Patches to features, each normalized."""

    def __init__(self, config: DotsVisionConfig) -> None:
        super().__init__()
        side = config.patch_size
        self.shape = (-1, config.num_channels, side, side)
        self.proj = nn.Conv2d(config.num_channels, config.embed_dim, kernel_size=side, stride=side)
        self.norm = Qwen2RMSNorm(config.embed_dim, eps=config.rms_norm_eps)

    def forward(self, pixels_PX: Tensor) -> Tensor:
        """Return the features (P, V)."""
        features: Tensor = self.norm(self.proj(pixels_PX.view(self.shape)).flatten(1))
        return features


class DotsPreprocessor(nn.Module):
    """The patches under their published name."""

    def __init__(self, config: DotsVisionConfig) -> None:
        super().__init__()
        self.patchifier = DotsPatches(config)

    def forward(self, pixels_PX: Tensor) -> Tensor:
        """Return the features (P, V)."""
        features: Tensor = self.patchifier(pixels_PX)
        return features


class DotsMLP(nn.Module):
    """SwiGLU; fc1 is the gate."""

    def __init__(self, config: DotsVisionConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.embed_dim, config.intermediate_size, bias=config.use_bias)
        self.fc2 = nn.Linear(config.intermediate_size, config.embed_dim, bias=config.use_bias)
        self.fc3 = nn.Linear(config.embed_dim, config.intermediate_size, bias=config.use_bias)

    def forward(self, x_PV: Tensor) -> Tensor:
        """Return the result (P, V)."""
        out: Tensor = self.fc2(nn.functional.silu(self.fc1(x_PV)) * self.fc3(x_PV))
        return out


class DotsBlock(nn.Module):
    """A layer of the tower."""

    def __init__(self, config: DotsVisionConfig) -> None:
        super().__init__()
        # Its type takes Qwen2-VL's configuration; it reads embed_dim, num_heads and the choice of attention.
        self.attn = VisionAttention(config)  # type: ignore[arg-type]
        if not config.use_bias:
            self.attn.qkv = nn.Linear(config.embed_dim, 3 * config.embed_dim, bias=False)
            self.attn.proj = nn.Linear(config.embed_dim, config.embed_dim, bias=False)
        self.norm1 = Qwen2RMSNorm(config.embed_dim, eps=config.rms_norm_eps)
        self.mlp = DotsMLP(config)
        self.norm2 = Qwen2RMSNorm(config.embed_dim, eps=config.rms_norm_eps)

    def forward(self, x_PV: Tensor, **packing: Any) -> Tensor:
        """Return the result (P, V); see VisionAttention for the keywords."""
        x_PV = x_PV + self.attn(self.norm1(x_PV), **packing)
        out: Tensor = x_PV + self.mlp(self.norm2(x_PV))
        return out


class DotsVisionTower(PreTrainedModel):
    """The tower, with the merger after its layers."""

    config_class = DotsVisionConfig
    main_input_name = "hidden_states"
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True

    def __init__(self, config: DotsVisionConfig) -> None:
        super().__init__(config)
        self.spatial_merge_size = config.spatial_merge_size
        self.head_size = config.embed_dim // config.num_attention_heads
        self.patch_embed = DotsPreprocessor(config)
        self.blocks = nn.ModuleList([DotsBlock(config) for _ in range(config.num_hidden_layers)])
        self.post_trunk_norm = (
            Qwen2RMSNorm(config.embed_dim, eps=config.rms_norm_eps) if config.post_norm else nn.Identity()
        )
        self.merger = PatchMerger(config.hidden_size, config.embed_dim, config.spatial_merge_size)
        self.post_init()

    def forward(self, hidden_states: Tensor, grid_thw: Tensor, **keywords: Any) -> Any:
        """Return the embeddings (E, H) as `pooler_output`.

        Args:
            hidden_states: pixels (P, X).
            grid_thw: (I, 3), frames, rows and columns of patches.
            keywords: positions and lengths, if the caller has computed them; see transformers.vision_utils.
        """
        positions_P2 = get_vision_position_ids(grid_thw, self.spatial_merge_size, kwargs=keywords)
        bounds, longest = get_vision_attention_seqlens(grid_thw, self.config, kwargs=keywords)
        x_PV = self.patch_embed(hidden_states)
        rotations = self._rotations(positions_P2.to(x_PV.device))
        for block in self.blocks:
            x_PV = block(x_PV, cu_seqlens=bounds, max_seqlen=longest, position_embeddings=rotations)
        merged: Any = self.merger(self.post_trunk_norm(x_PV))
        return BaseModelOutputWithPooling(last_hidden_state=x_PV, pooler_output=merged)

    def _rotations(self, positions_P2: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosine and sine (P, head size): half the frequencies turn by row, half by column."""
        half = self.head_size // 2
        steps = torch.arange(0, half, 2, dtype=torch.float32, device=positions_P2.device)
        angles = (positions_P2[..., None] * _THETA ** (-steps / half)).flatten(1)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()


class DotsOCRForCausalLM(Qwen2ForCausalLM):
    """Qwen2 with its head, and the tower."""

    config_class = DotsOCRConfig

    def __init__(self, config: DotsOCRConfig) -> None:
        super().__init__(config)
        self.vision_tower = DotsVisionTower(config.vision_config)
        self.post_init()

    def get_image_features(self, pixel_values: Tensor, image_grid_thw: Tensor, **keywords: Any) -> Any:
        """Return the embeddings of each image as `pooler_output`."""
        pixels = pixel_values.to(self.vision_tower.merger.ln_q.weight.dtype)
        found = self.vision_tower(pixels, grid_thw=image_grid_thw, **keywords)
        sizes = (image_grid_thw.prod(-1) // self.vision_tower.spatial_merge_size**2).tolist()
        found.pooler_output = found.pooler_output.split(sizes)
        return found

    def forward(
        self,
        input_ids: Tensor | None = None,
        pixel_values: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        **keywords: Any,
    ) -> Any:
        """As Qwen2ForCausalLM's, with images in the places of their placeholders."""
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
        if pixel_values is not None:
            assert image_grid_thw is not None
            seen = self.get_image_features(pixel_values, image_grid_thw).pooler_output
            inputs_embeds = with_media(inputs_embeds, input_ids, self.config.image_token_id, seen)
        # generate() computes masks and positions only for a model that names them.
        keywords |= {"attention_mask": attention_mask, "position_ids": position_ids}
        return super().forward(inputs_embeds=inputs_embeds, **keywords)

    def prepare_inputs_for_generation(
        self,
        input_ids: Any,
        *arguments: Any,
        pixel_values: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        is_first_iteration: bool | None = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Images go in with the prompt alone."""
        kwargs["is_first_iteration"] = is_first_iteration
        parent: Any = super()
        made: dict[str, Any] = parent.prepare_inputs_for_generation(input_ids, *arguments, **kwargs)
        return made | ({"pixel_values": pixel_values, "image_grid_thw": image_grid_thw} if is_first_iteration else {})
