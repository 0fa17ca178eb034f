"""Keys and values in FP8 (e4m3), without scales: on GPUs that convert it in hardware, and on CPUs.

Attention never sees other numbers than those that are stored: a step's own keys and values are rounded before they are
used. So an answer does not depend on how its prompt was cut, or on prefix hits.

Three bits follow a number's leading one, so it moves by at most 1/16 of itself. Numbers below 2^-6 move by at most
2^-10, and those beyond 448, the largest, become 448.

Shapes: T tokens, L positions read, K key-value heads, C head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from beheld.attention.backend import LayerKV

TYPE = torch.float8_e4m3fn
LARGEST = 448.0


@dataclass(eq=False)
class Float8KV(LayerKV):
    """See LayerKV; keys and values are of TYPE."""

    def clear(self, blocks: slice) -> None:
        """Zero these blocks."""
        for tensor in (self.keys, self.values):
            _bytes(tensor)[blocks].zero_()

    def write(self, slots_T: Tensor, k_TKC: Tensor, v_TKC: Tensor) -> None:
        """Round and store."""
        for cache, new_TKC in ((self.keys, k_TKC), (self.values, v_TKC)):
            _bytes(cache).flatten(0, 1).index_copy_(0, slots_T, _bytes(rounded(new_TKC)))

    def read(self, slots_L: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return keys and values (L, K, C)."""
        keys, values = (_bytes(each).flatten(0, 1).index_select(0, slots_L) for each in (self.keys, self.values))
        return keys.view(TYPE).to(dtype), values.view(TYPE).to(dtype)

    def as_read(self, k_TKC: Tensor, v_TKC: Tensor) -> tuple[Tensor, Tensor]:
        """Return the numbers that are read once these are stored."""
        return rounded(k_TKC).to(k_TKC.dtype), rounded(v_TKC).to(v_TKC.dtype)


def rounded(x_TKC: Tensor) -> Tensor:
    """Return the nearest numbers of TYPE; NaN stays NaN."""
    return x_TKC.clamp(-LARGEST, LARGEST).to(TYPE)


def _bytes(tensor: Tensor) -> Tensor:
    """Return the same memory as bytes, which more operations take."""
    return tensor.view(torch.uint8)
