"""FlashAttention-3, if installed, for what it computes faster than our kernels: whole prompts and long windows.

On an H200, 8 prompts of 1024 tokens took 91 microseconds per layer instead of 106 (16 heads of 128 over 2), and 8
windows of 1024 patches of a tower 132 instead of 260.

Shapes: T tokens, H query heads, K key-value heads, C head size, B sequences or windows.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any, Protocol

import torch
from torch import Tensor

from beheld.attention.backend import AttnMetadata, GroupMetadata, LayerKV
from beheld.attention.definition import defined
from beheld.attention.triton_paged import TritonBackend
from beheld.core.errors import first_line
from beheld.platform.platform import Platform
from beheld.platform.registry import platform_of
from beheld.utils.log import get_logger

logger = get_logger(__name__)

# The package's name, and that of a distribution of its forward pass alone.
_MODULES = ("flash_attn_interface", "fa3_fwd_interface")
# The Triton kernel takes windows that are shorter than this on average: 35 microseconds instead of 80 for 128 windows
# of 64 patches.
_LONG_WINDOW = 256
# And prompts that are shorter than this on average: one of 282 tokens took Triton 9 microseconds and FlashAttention 14,
# 29 of them 62 and 65, and 16 of 512 tokens 126 and 119.
_LONG_PROMPT = 512


class Flash(Protocol):
    """Computes attention of packed sequences."""

    def __call__(
        self,
        q_THC: Tensor,
        k_TKC: Tensor,
        v_TKC: Tensor,
        bounds_B1: Tensor,
        scale: float,
        *,
        causal: bool = False,
        softcap: float = 0.0,
    ) -> Tensor:
        """Attend q, k, v in bfloat16 -> (T, H, C); `bounds_B1`: int32, cumulative lengths."""


@functools.cache
def installed(platform: Platform) -> Flash | None:
    """Return FlashAttention-3 for this device; None if it is absent, not for this hardware, or failed a trial."""
    name = next((name for name in _MODULES if importlib.util.find_spec(name) is not None), None)
    if name is None or not platform.flash_attention:
        return None
    try:
        flash = _bound(importlib.import_module(name).flash_attn_varlen_func)
        _try(flash, platform.device)
    except Exception as error:
        # Any failure of an installed build falls back to other kernels.
        logger.warning("FlashAttention-3 (%s) is installed but not used: %s", name, first_line(error))
        return None
    return flash


def _bound(varlen: Any) -> Flash:
    def flash(
        q_THC: Tensor,
        k_TKC: Tensor,
        v_TKC: Tensor,
        bounds_B1: Tensor,
        scale: float,
        *,
        causal: bool = False,
        softcap: float = 0.0,
    ) -> Tensor:
        # The longest sequence need not be known: the total length is an upper bound.
        most = q_THC.shape[0]
        out = varlen(
            q_THC,
            k_TKC,
            v_TKC,
            bounds_B1,
            bounds_B1,
            most,
            most,
            softmax_scale=scale,
            causal=causal,
            softcap=softcap,
        )
        # Some versions also return the softmax sums.
        found: Tensor = out[0] if isinstance(out, tuple) else out
        return found

    return flash


@functools.cache
def computes(platform: Platform, size: int, group: int, softcap: float) -> bool:
    """Return whether it computes heads of `size` elements, `group` of them per key-value head.

    A distribution may be built without some sizes, or without soft caps. Tried at the first such layer, outside any
    graph.
    """
    flash = installed(platform)
    if flash is None or size % 8 or size > 256:
        return False
    try:
        _try(flash, platform.device, size, group, softcap)
    except Exception as error:
        logger.warning("FlashAttention-3 is not used for heads of %d elements: %s", size, first_line(error))
        return False
    return True


@torch.inference_mode()
def _try(flash: Flash, device: torch.device, size: int = 64, group: int = 1, softcap: float = 0.0) -> None:
    """Compare two small calls with the definition of attention: of text, and of two windows of a tower.

    Raises:
        ValueError: the results differ by more than rounding.
    """
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = torch.randn(3, 100, 2 * group, size, generator=generator, device=device).bfloat16().unbind(0)
    k, v = k[:, :2], v[:, :2]
    number_T = torch.arange(100, device=device)
    seen_TT = {True: number_T[:, None] >= number_T, False: (number_T[:, None] < 60) == (number_T < 60)}
    for causal, lengths in ((True, [0, 100]), (False, [0, 60, 100])):
        bounds = torch.tensor(lengths, dtype=torch.int32, device=device)
        out = flash(q, k, v, bounds, 0.125, causal=causal, softcap=softcap)
        want = defined(q, k, v, seen_TT[causal], 0.125, softcap)
        if not (out - want).norm() < 0.02 * want.norm():
            raise ValueError("its results are wrong")


def takes_windows(q_THC: Tensor, num_windows: int) -> bool:
    """Return whether it computes a tower's windows, and faster than Triton."""
    worth = q_THC.dtype == torch.bfloat16 and q_THC.shape[0] >= _LONG_WINDOW * num_windows
    return worth and computes(platform_of(q_THC.device), q_THC.shape[2], 1, 0.0)


class FlashBackend(TritonBackend):
    """Triton's kernels, except for steps in which all prompts start at position 0 and no token looks ahead."""

    name = "flash"

    def __init__(self, flash: Flash, platform: Platform) -> None:
        super().__init__()
        self._flash = flash
        self._platform = platform

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
        """Store, then attend; see AttentionBackend."""
        group = metadata.groups[kv.group]
        size, heads = q_THC.shape[2], q_THC.shape[1] // k_TKC.shape[1]
        takes = q_THC.dtype == torch.bfloat16 and size == v_TKC.shape[2] and sinks_H is None
        takes = takes and _plain(metadata, group, q_THC.shape[0])
        if not takes or not computes(self._platform, size, heads, softcap or 0.0):
            return super().attend(q_THC, k_TKC, v_TKC, kv, metadata, scale, softcap, sinks_H)
        self.store(k_TKC, v_TKC, kv, metadata)
        k_TKC, v_TKC = kv.as_read(k_TKC, v_TKC)
        return self._flash(q_THC, k_TKC, v_TKC, metadata.cu_q_B1, scale, causal=True, softcap=softcap or 0.0)


def _plain(metadata: AttnMetadata, group: GroupMetadata, num_tokens: int) -> bool:
    if metadata.num_decodes or group.window is not None or group.chunk is not None or any(metadata.starts):
        return False
    if group.ahead != "never" and any(metadata.both_ways):
        return False
    # A captured pass does not know its number of sequences; passes without prefixes are large.
    return metadata.starts_B is not None or num_tokens >= _LONG_PROMPT * len(metadata.starts)
