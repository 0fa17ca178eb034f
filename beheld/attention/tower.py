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
    return _padded(q_THC, k_THC, v_THC, cu_seq_lens_q, max_length_q, scaling).unsqueeze(0), None


def _padded(q_THC: Tensor, k_THC: Tensor, v_THC: Tensor, cu_W1: Tensor, longest: int, scale: float | None) -> Tensor:
    """Windows of one length as a batch; where they differ, the shorter ones are padded and their padding is hidden.

    Token t of window w stands in row w, column t - cu[w].
    """
    lengths_W = cu_W1[1:] - cu_W1[:-1]
    windows, total = len(lengths_W), q_THC.shape[0]
    if windows * longest == total:
        q, k, v = (x.unflatten(0, (windows, longest)).transpose(1, 2) for x in (q_THC, k_THC, v_THC))
        return F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2).flatten(0, 1)
    if windows * longest > 4 * total:
        # Mostly padding: one long picture among many small windows.
        lengths = lengths_W.tolist()
        windows_qkv = zip(q_THC.split(lengths), k_THC.split(lengths), v_THC.split(lengths), strict=True)
        return torch.cat([_alone(q, k, v, scale) for q, k, v in windows_qkv])
    shown_WL = torch.arange(longest, device=cu_W1.device) < lengths_W.unsqueeze(1)
    q, k, v = (_spread(x, shown_WL).transpose(1, 2) for x in (q_THC, k_THC, v_THC))
    out_WHLC = F.scaled_dot_product_attention(q, k, v, attn_mask=shown_WL[:, None, None, :], scale=scale)
    return out_WHLC.transpose(1, 2)[shown_WL]


def _alone(q_LHC: Tensor, k_LHC: Tensor, v_LHC: Tensor, scale: float | None) -> Tensor:
    """One window."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q_LHC, k_LHC, v_LHC))
    return F.scaled_dot_product_attention(q, k, v, scale=scale)[0].transpose(0, 1)


def _spread(x_THC: Tensor, shown_WL: Tensor) -> Tensor:
    """Tokens into rows of windows (W, L, H, C); zeros where a row is padding."""
    x_WLHC = x_THC.new_zeros((*shown_WL.shape, *x_THC.shape[1:]))
    x_WLHC[shown_WL] = x_THC
    return x_WLHC
