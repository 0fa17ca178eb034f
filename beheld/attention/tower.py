"""Attention of vision towers that pack pictures and windows into one sequence.

transformers gives such attention the running sum of the packed lengths (`cu_seq_lens_q`) only when the name of
the implementation holds "flash"; under any other name it calls once per window, which for a 448 x 448 picture in
Qwen2.5-VL is some 450 calls. So this registers under such a name, and computes all windows in one call.

Shapes: T tokens of all windows, W windows, L tokens of the longest, H heads, C head size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

NAME = "beheld_flash_tower"

# With more lengths than this, windows are computed one by one.
_MOST_LENGTHS = 8

# Families whose towers were seen to pack, and to call attention with the running sum and nothing else of their own.
PACKING = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v", "glm4v_moe"})


def register() -> str:
    """Register the function (again is harmless) and return its name."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, tower_attention)
    return NAME


def tower_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention within each window, both ways. query, key, value (1, H, T, C) -> (1, T, H, C)."""
    assert attention_mask is None
    assert cu_seq_lens_q is not None
    assert max_length_q is not None
    q_THC, k_THC, v_THC = (x[0].transpose(0, 1) for x in (query, key, value))
    return _windows(q_THC, k_THC, v_THC, cu_seq_lens_q, max_length_q, scaling).unsqueeze(0), None


def _windows(q_THC: Tensor, k_THC: Tensor, v_THC: Tensor, cu_W1: Tensor, longest: int, scale: float | None) -> Tensor:
    """Windows of one length are a batch; a tower has few lengths (whole windows, and those at two edges)."""
    lengths_W = cu_W1[1:] - cu_W1[:-1]
    if len(lengths_W) * longest == q_THC.shape[0]:
        return _batch(q_THC, k_THC, v_THC, longest, scale)
    lengths = lengths_W.tolist()
    if len(set(lengths)) > _MOST_LENGTHS:
        parts = zip(q_THC.split(lengths), k_THC.split(lengths), v_THC.split(lengths), strict=True)
        return torch.cat([_batch(*qkv, length, scale) for qkv, length in zip(parts, lengths, strict=True) if length])
    length_T = lengths_W.repeat_interleave(lengths_W)
    out_THC = torch.empty_like(q_THC)
    for length in set(lengths) - {0}:
        own = (length_T == length).nonzero().squeeze(1)
        out_THC[own] = _batch(q_THC[own], k_THC[own], v_THC[own], length, scale)
    return out_THC


def _batch(q_THC: Tensor, k_THC: Tensor, v_THC: Tensor, length: int, scale: float | None) -> Tensor:
    """Windows of this length, one after the other."""
    q, k, v = (x.unflatten(0, (-1, length)).transpose(1, 2) for x in (q_THC, k_THC, v_THC))
    return F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2).flatten(0, 1)
