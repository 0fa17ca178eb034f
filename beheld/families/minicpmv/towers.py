"""MiniCPM-V's tower and resampler: SigLIP's layers over slices of any shape, and queries that read their features.

Shapes: V width of the tower, H hidden size, Q queries. A grid has rows and columns of patches.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate
from transformers.models.siglip.modeling_siglip import SiglipEncoder

from beheld.families.minicpmv.config import MiniCPMVConfig

Grid = tuple[int, int]


class MiniCPMVEmbeddings(nn.Module):
    """Patches with learned positions, which cover each slice whatever its shape."""

    def __init__(self, config: MiniCPMVConfig) -> None:
        super().__init__()
        vision = config.vision_config
        self.interpolated = config.facts.patches == "interpolated"
        self.side = vision.image_size // vision.patch_size
        self.patch_embedding = nn.Conv2d(3, vision.hidden_size, vision.patch_size, vision.patch_size)
        self.position_embedding = nn.Embedding(self.side**2, vision.hidden_size)

    def forward(self, pixels: Tensor, grid: Grid) -> Tensor:
        """Return (slices, patches, V) of patches (slices, patches, 3, side, side) of one grid."""
        x_NV = self.patch_embedding(pixels.flatten(0, 1).to(self.patch_embedding.weight.dtype)).flatten(1)
        return x_NV.unflatten(0, pixels.shape[:2]) + (self._between(grid) if self.interpolated else self._nearest(grid))

    def _between(self, grid: Grid) -> Tensor:
        """Return the positions (patches, V) of a grid, interpolated between the learned ones."""
        learned = self.position_embedding.weight
        if grid == (self.side, self.side):
            return learned
        square = learned.float().unflatten(0, (self.side, self.side)).permute(2, 0, 1)[None]
        return interpolate(square, size=grid, mode="bicubic", antialias=True)[0].flatten(1).T.to(learned)

    def _nearest(self, grid: Grid) -> Tensor:
        """Return the positions (patches, V) of a grid, over which the learned ones are spread."""
        device = self.position_embedding.weight.device
        rows, columns = (self._buckets(count, device) for count in grid)
        spread: Tensor = self.position_embedding((rows[:, None] * self.side + columns).flatten())
        return spread

    def _buckets(self, count: int, device: Any) -> Tensor:
        """Return the learned position of each of `count` patches along one axis."""
        bounds = torch.arange(1 / self.side, 1.0, 1 / self.side)
        places = torch.arange(0, 1 - 1e-6, 1 / count)
        return torch.bucketize(places, bounds, right=True).to(device)


class MiniCPMVTower(nn.Module):
    """The tower under its published name."""

    def __init__(self, config: MiniCPMVConfig) -> None:
        super().__init__()
        vision = config.vision_config
        self.embeddings = MiniCPMVEmbeddings(config)
        self.encoder = SiglipEncoder(vision)
        if config.drop_vision_last_layer:
            self.encoder.layers = self.encoder.layers[:-1]
        self.post_layernorm = nn.LayerNorm(vision.hidden_size, eps=vision.layer_norm_eps)

    def forward(self, pixels: Tensor, grid: Grid) -> Tensor:
        """Return the features (slices, patches, V) of slices of one grid."""
        x_SPV = self.encoder(inputs_embeds=self.embeddings(pixels, grid)).last_hidden_state
        features: Tensor = self.post_layernorm(x_SPV)
        return features


class MiniCPMVResampler(nn.Module):
    """Queries that attend to a slice's features, whose keys have sinusoidal positions of both axes."""

    def __init__(self, config: MiniCPMVConfig) -> None:
        super().__init__()
        width, hidden = config.vision_config.hidden_size, config.hidden_size
        self.query = nn.Parameter(torch.zeros(config.query_num, hidden))
        if config.facts.query_positions:
            self.pos_embed = nn.Parameter(torch.zeros(config.query_num, hidden))
        self.kv_proj = nn.Linear(width, hidden, bias=False) if width != hidden else nn.Identity()
        self.attn = nn.MultiheadAttention(hidden, hidden // 128)
        self.ln_q = nn.LayerNorm(hidden, eps=1e-6)
        self.ln_kv = nn.LayerNorm(hidden, eps=1e-6)
        self.ln_post = nn.LayerNorm(hidden, eps=1e-6)
        self.proj = nn.Parameter(torch.zeros(hidden, hidden))

    def forward(self, features: Tensor, grid: Grid) -> Tensor:
        """Return the embeddings (slices, Q, H) of features (slices, patches, V) of one grid."""
        # Of a view, PyTorch multiplies each patch's rows with the whole matrix anew.
        x_PSH = self.ln_kv(self.kv_proj(features)).transpose(0, 1).contiguous()
        keys = x_PSH + self._positions(grid, x_PSH)[:, None]
        queries = self.ln_q(self.query)
        if hasattr(self, "pos_embed"):
            queries = queries + self.pos_embed
        asked = queries[:, None].repeat(1, len(features), 1)
        out = self.attn(asked, keys, x_PSH, need_weights=False)[0].transpose(0, 1)
        embeds: Tensor = self.ln_post(out) @ self.proj
        return embeds

    def _positions(self, grid: Grid, like: Tensor) -> Tensor:
        """Return sines and cosines (patches, H), of the column in the first half and of the row in the second."""
        rows, columns = grid
        quarter = like.shape[-1] // 4
        omega = 1.0 / 10000 ** (torch.arange(quarter, dtype=torch.float32) / quarter)
        row, column = (torch.arange(count, dtype=torch.float32)[:, None] * omega for count in grid)
        row, column = (torch.cat((angle.sin(), angle.cos()), -1) for angle in (row, column))
        both = torch.cat((column.expand(rows, -1, -1), row[:, None].expand(-1, columns, -1)), -1)
        return both.flatten(0, 1).to(like)
