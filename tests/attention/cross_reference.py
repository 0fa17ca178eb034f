"""Attention to what stands beside the text, written out: one token and one head at a time, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from beheld.attention.cross import CrossMetadata, CrossRun

LAYERS = 2


def states(
    count: int, heads: int = 2, size: int = 8, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Tensor:
    """Keys and values of one item, (E, L, 2, K, C), laid out as layers make them."""
    return torch.randn(LAYERS, 2, count, heads, size, dtype=dtype, device=device).movedim(2, 0)


def metadata(num_tokens: int, *runs: tuple[tuple[tuple[int, int], ...], tuple[Tensor, ...]]) -> CrossMetadata:
    """Of runs given as (ranges, states)."""
    return CrossMetadata(tuple(CrossRun(*run) for run in runs), torch.ones(num_tokens))


def decode(*seen: tuple[Tensor, ...]) -> CrossMetadata:
    """One token each."""
    return metadata(len(seen), *((((b, b + 1),), items) for b, items in enumerate(seen)))


def expected(q_THC: Tensor, layer: int, known: CrossMetadata, scale: float) -> Tensor:
    """What a backend should answer (T, H, C), in float64."""
    out_THC = torch.zeros_like(q_THC, dtype=torch.float64)
    for run in known.runs:
        kv = torch.cat([item[:, layer] for item in run.states]).double()
        group = q_THC.shape[1] // kv.shape[2]
        k_KEC, v_KEC = (kv[:, part].transpose(0, 1) for part in (0, 1))
        for token in (token for low, high in run.ranges for token in range(low, high)):
            q_KGC = q_THC[token].double().unflatten(0, (-1, group))
            out_KGC = torch.softmax(q_KGC @ k_KEC.transpose(1, 2) * scale, -1) @ v_KEC
            out_THC[token] = out_KGC.flatten(0, 1)
    return out_THC
