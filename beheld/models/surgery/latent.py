"""Lets layers of latent attention (MLA) give the paged cache their latents instead of all heads' keys and values.

transformers' layers compute queries, a latent and a rotary key of each token, and call `expand_kv`, which makes keys
and values of all heads with `kv_b_proj`, before they call attention. Here `expand_kv` passes the latents on, and the
matrices of `kv_b_proj` go with them, so that the backend multiplies them where it costs least (attention/latent.py).
How a layer rotates or scales its queries does not matter.

A layer is known by its parts, and by a trial: `expand_kv` gives what the matrices say.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from beheld.attention.latent import LatentUp, expanded
from beheld.core.errors import ModelError
from beheld.models.surgery.operation import Changes
from beheld.quant.linear import StoredLinear, linear_of

_PARTS = ("kv_a_proj_with_mqa", "kv_b_proj", "expand_kv")
_TRIED = 3


def pass_latents_on(model: nn.Module, changes: Changes) -> int:
    """Let every layer of latent attention pass its latents on; returns how many there are.

    Raises:
        ModelError: a layer has these parts, but they compute something else.
    """
    found = [module for module in model.modules() if all(hasattr(module, name) for name in _PARTS)]
    for attention in found:
        _pass_on(attention, changes)
    return len(found)


def _pass_on(attention: Any, changes: Changes) -> None:
    linear = attention.kv_b_proj
    if isinstance(linear, StoredLinear):
        linear = linear.restored()
    name = type(attention).__name__
    if type(linear) is not nn.Linear or linear.bias is not None:
        raise ModelError(f"The kv_b_proj of a {name} is a {type(linear).__name__} of another form than latents need.")
    up = LatentUp(linear.weight.data, attention.num_heads)
    if not _is_expansion(attention, linear, up):
        raise ModelError(f"A {name} makes other keys and values of its latents than its kv_b_proj says.")
    changes.replace(attention, "kv_b_proj", up, lambda made: linear_of(made.weight.data))
    changes.set(attention, "expand_kv", _latents)


def _latents(kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
    """Return latents with rotary keys (1, 1, T, W) as keys, and the latents as values, which nobody reads."""
    return torch.cat([kv_nope, k_rot], dim=-1), kv_nope


@torch.no_grad()
def _is_expansion(attention: Any, linear: nn.Linear, up: LatentUp) -> bool:
    """Return whether `expand_kv` gives the keys and values of attention/latent.py, for some latents.

    Args:
        linear: `kv_b_proj` without quantization: products of a stored one may round latents.
    """
    rank, rotary = up.weight.shape[1], attention.qk_rope_head_dim
    count = _TRIED * (rank + rotary)
    latent_LW = torch.arange(count, dtype=torch.float32, device=up.weight.device).sin().view(_TRIED, -1)
    latent_LW = latent_LW.to(up.weight.dtype)
    latent_11LW = latent_LW[None, None]
    own, attention.kv_b_proj = attention.kv_b_proj, linear
    try:
        given = attention.expand_kv(latent_11LW[..., :rank], latent_11LW[..., rank:])
    finally:
        attention.kv_b_proj = own
    wanted = expanded(latent_LW, up.up_HDR, attention.qk_nope_head_dim)
    return all(
        torch.allclose(a[0].transpose(0, 1).float(), b.float(), atol=1e-3, rtol=1e-2)
        for a, b in zip(given, wanted, strict=True)
    )
