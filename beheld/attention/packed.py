"""Attention of encoders: both ways within each prompt of a step, without a cache.

A step's prompts lie one after another, without padding. Rows after the last one, which fill a pass up to a number that
its matrix products like, count as one more prompt, which nobody reads.

Shapes: T tokens of all prompts, N tokens of one, H heads, C head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from beheld.attention import tower  # noqa: F401  (defines the operator)
from beheld.attention.backend import AttnMetadata, LayerKV, LayerLatent, Sharing
from beheld.attention.context import current
from beheld.attention.latent import LatentTurn
from beheld.core.errors import ModelError

NAME = "beheld_packed"


def register(how: str) -> str:
    """Register the function in transformers (repeated calls are harmless) and return its name.

    Args:
        how: what computes attention within prompts; see select.select_tower.
    """
    from transformers import AttentionInterface

    name = f"{NAME}_{how}"
    AttentionInterface.register(name, {"flash": _by_flash, "triton": _by_triton, "torch": packed_attention}[how])
    return name


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = False,
    how: str = "torch",
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend within each prompt: query, key, value (1, H, T, C) -> (1, T, H, C).

    A token sees those whose distance is less than `sliding_window`, and with `is_causal` none after it.

    Raises:
        ModelError: the layer brings a mask, or a captured pass would need the prompts' lengths on the host.
    """
    if attention_mask is not None:
        raise ModelError(f"{type(module).__name__} needs a mask, which packed prompts do not have.")
    metadata = current().metadata
    captured = metadata.starts_B is not None
    if captured and (sliding_window is not None or is_causal):
        raise ModelError(f"Prompts of a {type(module).__name__} are computed one by one, which no graph holds.")
    lengths, bounds_B1 = ((), metadata.cu_q_B1) if captured else _prompts(metadata, query.shape[2])
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    # Padding rows may see anything, because nobody reads them.
    if sliding_window is not None and max(metadata.lengths) > sliding_window:
        return _windowed(query, key, value, lengths, scale, sliding_window), None
    if is_causal:
        return _causal(query, key, value, lengths, scale), None
    found: Tensor = torch.ops.beheld.tower(query, key, value, bounds_B1, scale, how)
    return found, None


def _prompts(metadata: AttnMetadata, rows: int) -> tuple[tuple[int, ...], Tensor]:
    """Return the lengths of a pass's prompts and where they start and end; rows that fill it up are the last one."""
    extra = rows - sum(metadata.lengths)
    if not extra:
        return metadata.lengths, metadata.cu_q_B1
    return (*metadata.lengths, extra), F.pad(metadata.cu_q_B1, (0, 1), value=rows)


def _by_flash(*inputs: Any, **options: Any) -> tuple[Tensor, None]:
    return packed_attention(*inputs, **options | {"how": "flash"})


def _by_triton(*inputs: Any, **options: Any) -> tuple[Tensor, None]:
    return packed_attention(*inputs, **options | {"how": "triton"})


def _windowed(
    q_1HTC: Tensor, k_1HTC: Tensor, v_1HTC: Tensor, lengths: tuple[int, ...], scale: float, reach: int
) -> Tensor:
    """Compute prompts one by one, each with the band of what its tokens see."""
    parts = zip(*(x.split(list(lengths), dim=2) for x in (q_1HTC, k_1HTC, v_1HTC)), strict=True)
    found = []
    for q_1HNC, k_1HNC, v_1HNC in parts:
        place_N = torch.arange(q_1HNC.shape[2], device=q_1HNC.device)
        seen_NN = (place_N[:, None] - place_N).abs() < reach
        found.append(F.scaled_dot_product_attention(q_1HNC, k_1HNC, v_1HNC, attn_mask=seen_NN, scale=scale))
    return torch.cat(found, dim=2).transpose(1, 2)


def _causal(q_1HTC: Tensor, k_1HTC: Tensor, v_1HTC: Tensor, lengths: tuple[int, ...], scale: float) -> Tensor:
    """Compute prompts one by one, each token with those before it."""
    parts = zip(*(x.split(list(lengths), dim=2) for x in (q_1HTC, k_1HTC, v_1HTC)), strict=True)
    found = [F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale) for q, k, v in parts]
    return torch.cat(found, dim=2).transpose(1, 2)


_NO_CACHE = "A layer of an encoder asked for keys and values of a cache."


class PackedBackend:
    """The backend of a model without a cache: its layers call `packed_attention`."""

    name = "packed"
    captures_prefill = False
    stores_with_decodes = False
    sharing: Sharing | None = None
    delta = None

    def begin(self, metadata: AttnMetadata) -> None:
        """See AttentionBackend: there is nothing to prepare."""

    def outside_graphs(self, pieces: Sequence[tuple[int, int]]) -> bool:
        """See AttentionBackend: no graph contains prompts."""
        return False

    def attend(
        self,
        q_THC: Tensor,
        k_TKC: Tensor,
        v_TKC: Tensor,
        kv: LayerKV,
        metadata: AttnMetadata,
        scale: float,
        softcap: float | None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """See AttentionBackend; no layer has a cache."""
        raise ModelError(_NO_CACHE)

    def store(self, k_TKC: Tensor, v_TKC: Tensor, kv: LayerKV, metadata: AttnMetadata) -> None:
        """See AttentionBackend; no layer has a cache."""
        raise ModelError(_NO_CACHE)

    def attend_latent(
        self, q_THC: Tensor, latent_TW: Tensor, up_HDR: Tensor, kv: LayerLatent, metadata: AttnMetadata, scale: float
    ) -> Tensor:
        """See AttentionBackend; no layer has a cache."""
        raise ModelError(_NO_CACHE)

    def store_latent(self, latent_TW: Tensor, kv: LayerLatent, metadata: AttnMetadata) -> None:
        """See AttentionBackend; no layer has a cache."""
        raise ModelError(_NO_CACHE)

    def attend_latent_row(
        self,
        q_HC: Tensor,
        latent_W: Tensor,
        turn: LatentTurn,
        up_HDR: Tensor,
        kv: LayerLatent,
        metadata: AttnMetadata,
        scale: float,
    ) -> Tensor:
        """See AttentionBackend; no layer has a cache."""
        raise ModelError(_NO_CACHE)
