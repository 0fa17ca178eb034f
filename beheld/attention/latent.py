"""Latent attention (MLA): keys and values of all heads follow from one latent of each position.

With the latent c (R numbers), the rotary key p (P numbers, shared by all heads) and a head's matrices U_k and U_v:

    key = [U_k c | p]        value = U_v c        query = [q_n | q_p]

The cache holds [c | p] alone. There are two ways to the same result:

    expanded    keys and values of all positions are computed from their latents: for prompts, whose queries share them
    absorbed    q_n U_k c = (U_k^T q_n) c, so queries meet latents directly, as one key for all heads whose first R
                numbers are its value; the output is U_v times the weighted latent: for decoding, which reads W numbers
                of each position

Shapes: T tokens, L positions, H heads, N numbers of a query without position, P rotary ones, C = N + P, V value size,
D = N + V, R latent size, W = R + P.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn


class Growth(NamedTuple):
    """Queries are multiplied by 1 + beta log(1 + position // span).

    Attributes:
        positions_T: the tokens' positions, int64.
    """

    positions_T: Tensor
    beta: float
    span: float


class LatentTurn(NamedTuple):
    """The latent's RMS norm and the rotation of queries and keys, which are applied to what products give.

    A rotated pair of numbers ends in two halves: the first of all pairs, then the second.

    Attributes:
        weight_R, eps: the norm's.
        cos_P, sin_P: for both halves, in the queries' type.
        interleaved: pairs lie side by side; otherwise half against half.
        growth: how queries grow with positions; None if they do not.
    """

    weight_R: Tensor
    eps: float
    cos_P: Tensor
    sin_P: Tensor
    interleaved: bool
    growth: Growth | None = None


def turned(q_THC: Tensor, latent_TW: Tensor, turn: LatentTurn) -> tuple[Tensor, Tensor]:
    """Return rotated queries, and normalized latents with rotated keys."""
    rank, rotary = turn.weight_R.numel(), turn.cos_P.numel()
    plain_THN, q_THP = q_THC.split([q_THC.shape[2] - rotary, rotary], dim=2)
    latent_TR, key_TP = latent_TW.split([rank, rotary], dim=1)
    wide_TR = latent_TR.float()
    scaled_TR = wide_TR * torch.rsqrt(wide_TR.pow(2).mean(-1, keepdim=True) + turn.eps)
    normed_TR = turn.weight_R * scaled_TR.to(latent_TW.dtype)
    q_THC = torch.cat([plain_THN, _rotated(q_THP, turn)], dim=2)
    if turn.growth is not None:
        positions_T, beta, span = turn.growth
        q_THC = q_THC * (1 + beta * torch.log(1 + torch.floor(positions_T / span))).to(q_THC.dtype).view(-1, 1, 1)
    return q_THC, torch.cat([normed_TR, _rotated(key_TP, turn)], dim=1)


def _rotated(x: Tensor, turn: LatentTurn) -> Tensor:
    cos, sin = turn.cos_P.chunk(2)[0], turn.sin_P.chunk(2)[0]
    first, second = (x[..., 0::2], x[..., 1::2]) if turn.interleaved else x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class LatentUp(nn.Module):
    """The matrices U_k and U_v of a layer's heads, in place of the linear layer that makes keys and values of latents.

    Args:
        weight: (H D, R).
        heads: H.
    """

    def __init__(self, weight: Tensor, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.heads = heads

    @property
    def up_HDR(self) -> Tensor:
        """Return the matrices, U_k before U_v."""
        return self.weight.view(self.heads, -1, self.weight.shape[1])

    def forward(self, latent: Tensor) -> Tensor:
        """Compute (..., R) -> (..., H D)."""
        return nn.functional.linear(latent, self.weight)


def absorbed(q_THC: Tensor, up_HDR: Tensor, rotary: int) -> Tensor:
    """Return queries of latents, (T, H, W)."""
    plain_THN, rotary_THP = q_THC.split([q_THC.shape[2] - rotary, rotary], dim=2)
    latent_THR = torch.bmm(plain_THN.transpose(0, 1), up_HDR[:, : plain_THN.shape[2]]).transpose(0, 1)
    return torch.cat([latent_THR, rotary_THP], dim=2)


def raised(out_THR: Tensor, up_HDR: Tensor, plain: int) -> Tensor:
    """Return heads' outputs (T, H, V) from weighted latents; `plain` is N."""
    return torch.bmm(out_THR.transpose(0, 1), up_HDR[:, plain:].transpose(1, 2)).transpose(0, 1)


def expanded(latent_LW: Tensor, up_HDR: Tensor, plain: int) -> tuple[Tensor, Tensor]:
    """Return keys (L, H, C) and values (L, H, V) of positions; `plain` is N."""
    heads, _, rank = up_HDR.shape
    made_LHD = nn.functional.linear(latent_LW[:, :rank], up_HDR.flatten(0, 1)).unflatten(1, (heads, -1))
    rotary_LHP = latent_LW[:, rank:].unsqueeze(1).expand(-1, heads, -1)
    return torch.cat([made_LHD[..., :plain], rotary_LHP], dim=2), made_LHD[..., plain:]


def absorbs(count: int, q_size: int, up_HDR: Tensor, width: int) -> bool:
    """Return whether `count` queries of one sequence cost less absorbed than expanded.

    Absorbed, each product with a position takes W + R numbers instead of C + V; expanded, each position costs R D.
    """
    both, rank = up_HDR.shape[1:]
    values = both - (q_size - (width - rank))
    return count * (width + rank - q_size - values) <= rank * both
