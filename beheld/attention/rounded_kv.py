"""Keys and values in int8, with a scale for each position and head, where attention reads them through LayerKV.

Attention never sees other numbers than those that are stored: a step's own keys and values are rounded before they are
used. So an answer does not depend on how its prompt was cut, or on prefix hits.

Shapes: T tokens, L positions read, K key-value heads, C head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from beheld.attention.backend import LayerKV

MOST = 127.0
# A head of zeros has this scale.
_LEAST = 1e-30


@dataclass(eq=False)
class RoundedKV(LayerKV):
    """See LayerKV; whole numbers in int8.

    Attributes:
        key_scales, value_scales: float32, (num_blocks, block_size, K).
    """

    key_scales: Tensor
    value_scales: Tensor

    def clear(self, blocks: slice) -> None:
        """Zero these blocks."""
        for tensor in (self.keys, self.values, self.key_scales, self.value_scales):
            tensor[blocks].zero_()

    def write(self, slots_T: Tensor, k_TKC: Tensor, v_TKC: Tensor) -> None:
        """Round and store."""
        for new_TKC, whole, scales in ((k_TKC, self.keys, self.key_scales), (v_TKC, self.values, self.value_scales)):
            whole_TKC, scale_TK = rounded(new_TKC)
            whole.flatten(0, 1).index_copy_(0, slots_T, whole_TKC)
            scales.flatten(0, 1).index_copy_(0, slots_T, scale_TK)

    def read(self, slots_L: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return keys and values (L, K, C)."""
        stored = (self.keys, self.key_scales, self.values, self.value_scales)
        keys, key_scales, values, value_scales = (each.flatten(0, 1).index_select(0, slots_L) for each in stored)
        return _meant(keys, key_scales, dtype), _meant(values, value_scales, dtype)

    def as_read(self, k_TKC: Tensor, v_TKC: Tensor) -> tuple[Tensor, Tensor]:
        """Return the numbers that are read once these are stored."""
        return _meant(*rounded(k_TKC), k_TKC.dtype), _meant(*rounded(v_TKC), v_TKC.dtype)


def rounded(x_TKC: Tensor) -> tuple[Tensor, Tensor]:
    """Return whole numbers in int8, and scales in float32 (T, K); a head's largest number becomes 127."""
    exact_TKC = x_TKC.float()
    scale_TK1 = exact_TKC.abs().amax(-1, keepdim=True).clamp_(min=_LEAST).div_(MOST)
    return (exact_TKC / scale_TK1).round_().to(torch.int8), scale_TK1.squeeze(-1)


def _meant(whole_TKC: Tensor, scale_TK: Tensor, dtype: torch.dtype) -> Tensor:
    return whole_TKC.float().mul_(scale_TK.unsqueeze(-1)).to(dtype)
