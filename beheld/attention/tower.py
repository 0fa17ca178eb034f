"""Attention of vision towers that pack images and windows into one sequence.

transformers passes the cumulative packed lengths (`cu_seq_lens_q`) only to implementations with "flash" in their names;
others it calls once per window, about 450 times for a 448 x 448 image in Qwen2.5-VL. This function therefore registers
under such a name and computes all windows in one call, a registered operator, so that torch.compile sees an opaque
call.

Shapes: T tokens of all windows, W windows, H heads, C head size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from beheld.attention import cpu_windows
from beheld.platform import operators

NAME = "beheld_flash_tower"

# With more distinct lengths than this, windows are computed one by one.
_MOST_LENGTHS = 8


def register(how: str = "torch") -> str:
    """Register the function (repeated calls are harmless) and return its name.

    Args:
        how: "flash", "triton" or "torch"; see select.select_tower.
    """
    from transformers import AttentionInterface

    name = f"{NAME}_{how}"
    AttentionInterface.register(name, {"flash": _by_flash, "triton": _by_triton, "torch": tower_attention}[how])
    return name


def tower_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    how: str = "torch",
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend within each window, both ways: query, key, value (1, H, T, C) -> (1, T, H, C)."""
    assert attention_mask is None
    assert cu_seq_lens_q is not None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return torch.ops.beheld.tower(query, key, value, cu_seq_lens_q, scale, how), None


def _by_flash(*inputs: Any, **options: Any) -> tuple[Tensor, None]:
    options["how"] = "flash"
    return tower_attention(*inputs, **options)


def _by_triton(*inputs: Any, **options: Any) -> tuple[Tensor, None]:
    options["how"] = "triton"
    return tower_attention(*inputs, **options)


def _tower(q_1HTC: Tensor, k_1HTC: Tensor, v_1HTC: Tensor, bounds_W1: Tensor, scale: float, how: str) -> Tensor:
    q_THC, k_THC, v_THC = (x[0].transpose(0, 1) for x in (q_1HTC, k_1HTC, v_1HTC))
    if how == "torch":
        return _windows(q_THC, k_THC, v_THC, bounds_W1, scale).contiguous().unsqueeze(0)
    from beheld.attention import flash, triton_tower

    q_THC, k_THC, v_THC = _dense(q_THC), _dense(k_THC), _dense(v_THC)
    attend = flash.installed() if how == "flash" and flash.takes_windows(q_THC, bounds_W1.shape[0] - 1) else None
    if attend is not None:
        return attend(q_THC, k_THC, v_THC, bounds_W1.int(), scale).unsqueeze(0)
    return triton_tower.attend_windows(q_THC, k_THC, v_THC, bounds_W1, scale).unsqueeze(0)


def _tower_shape(q_1HTC: Tensor, k_1HTC: Tensor, v_1HTC: Tensor, bounds_W1: Tensor, scale: float, how: str) -> Tensor:
    """Describe the result for torch.compile."""
    return q_1HTC.new_empty((1, q_1HTC.shape[2], q_1HTC.shape[1], q_1HTC.shape[3]))


def _dense(x_THC: Tensor) -> Tensor:
    return x_THC if x_THC.stride(2) == 1 else x_THC.contiguous()


def _windows(q_THC: Tensor, k_THC: Tensor, v_THC: Tensor, bounds_W1: Tensor, scale: float) -> Tensor:
    """Batch windows of equal length; a tower has few lengths (whole windows, and those at two edges)."""
    lengths_W = bounds_W1[1:] - bounds_W1[:-1]
    lengths = lengths_W.tolist()
    if cpu_windows.attends(q_THC, k_THC, v_THC, max(lengths)):
        return cpu_windows.attend(q_THC, k_THC, v_THC, bounds_W1, max(lengths), scale)
    if len(set(lengths)) == 1:
        return _batch(q_THC, k_THC, v_THC, lengths[0], scale)
    if len(set(lengths)) > _MOST_LENGTHS:
        parts = zip(q_THC.split(lengths), k_THC.split(lengths), v_THC.split(lengths), strict=True)
        return torch.cat([_batch(*qkv, length, scale) for qkv, length in zip(parts, lengths, strict=True) if length])
    length_T = lengths_W.repeat_interleave(lengths_W)
    out_THC = torch.empty_like(q_THC)
    for length in set(lengths) - {0}:
        own = (length_T == length).nonzero().squeeze(1)
        out_THC[own] = _batch(q_THC[own], k_THC[own], v_THC[own], length, scale)
    return out_THC


def _batch(q_THC: Tensor, k_THC: Tensor, v_THC: Tensor, length: int, scale: float) -> Tensor:
    """Compute windows of this length, one after another."""
    q, k, v = (x.unflatten(0, (-1, length)).transpose(1, 2) for x in (q_THC, k_THC, v_THC))
    return F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2).flatten(0, 1)


operators.register(
    "tower(Tensor q, Tensor k, Tensor v, Tensor bounds, float scale, str how) -> Tensor", _tower, _tower_shape
)
