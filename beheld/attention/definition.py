"""Attention by its definition: what trials of kernels are compared with before a kernel is trusted.

Shapes: T queries, S keys, H query heads, K key-value heads, C head size.
"""

from __future__ import annotations

import torch
from torch import Tensor


def defined(q_THC: Tensor, k_SKC: Tensor, v_SKC: Tensor, seen_TS: Tensor, scale: float, softcap: float = 0.0) -> Tensor:
    """Return attention (T, H, C), in float32. Query t sees key s where `seen_TS`; `softcap` 0 is none."""
    group = q_THC.shape[1] // k_SKC.shape[1]
    k_SHC, v_SHC = (x.float().repeat_interleave(group, 1) for x in (k_SKC, v_SKC))
    scores_HTS = torch.einsum("thc,shc->hts", q_THC.float(), k_SHC) * scale
    if softcap:
        scores_HTS = softcap * torch.tanh(scores_HTS / softcap)
    weights_HTS = torch.softmax(scores_HTS.masked_fill(~seen_TS, float("-inf")), -1)
    return torch.einsum("hts,shc->thc", weights_HTS, v_SHC)
