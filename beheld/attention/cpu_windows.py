"""Attention both ways within windows on a CPU, in one call; see cpu_windows_ir.py.

PyTorch's attention costs a call for each length of window, and its matrix products are slow for a few tokens. Scores,
shares and sums are float32, whatever type is given.

Shapes: T tokens of all windows, W windows, H heads, C head size.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from beheld.attention import cpu_windows_ir as ir
from beheld.platform import host, jit
from beheld.platform.registry import platform_of
from beheld.platform.vector_ir import float_bits

_KINDS = {torch.float32: "f32", torch.bfloat16: "bf16"}
# Longer windows are PyTorch's: at 2,048 tokens, sixteen heads of 64 numbers took half its time; more was not measured.
_LONGEST = 2048
# Products of numbers that one thread computes before others are worth being woken.
_FEW_PRODUCTS = 1 << 18


def attends(q_THC: Tensor, k_THC: Tensor, v_THC: Tensor, longest: int) -> bool:
    """Return whether `attend` computes windows of at most so many tokens."""
    size = q_THC.shape[2]
    known = q_THC.dtype in _KINDS and size % 16 == 0 and longest <= _LONGEST
    alike = all(x.shape == q_THC.shape and x.stride()[1:] == (size, 1) for x in (q_THC, k_THC, v_THC))
    return known and alike and _vectors(q_THC.device)


def _vectors(device: torch.device) -> bool:
    return platform_of(device).shares_host_memory and jit.available() and host.byte_products() is not None


@jit.made_once
def _compiled(size: int, kind: str) -> jit.CompiledModule:
    products = host.byte_products()
    in_hardware = products is not None and products.bfloat16
    return jit.CompiledModule((functools.partial(ir.module, size, kind, in_hardware),), ir.NAMES, ir.JOB)


def attend(q_THC: Tensor, k_THC: Tensor, v_THC: Tensor, bounds_W1: Tensor, longest: int, scale: float) -> Tensor:
    """Attend within each window -> (T, H, C).

    Args:
        q_THC, k_THC, v_THC: heads of a token lie next to each other, tokens at any distance.
        bounds_W1: where windows start and end, the last one at T.
        longest: the most tokens of a window.
    """
    total, heads, size = q_THC.shape
    windows, bounds_W1 = len(bounds_W1) - 1, bounds_W1.int().contiguous()
    y_THC = q_THC.new_empty(total, heads, size)
    padded = longest + -longest % 16
    threads = 1 if total * longest * heads * size < _FEW_PRODUCTS else torch.get_num_threads()
    threads = min(threads, windows * heads)
    scratch = torch.empty(threads * ir.scratch_numbers(size, padded))
    job = (ctypes.c_int64 * len(ir.JOB))(
        q_THC.data_ptr(), k_THC.data_ptr(), v_THC.data_ptr(), y_THC.data_ptr(), bounds_W1.data_ptr(),
        scratch.data_ptr(), q_THC.stride(0), k_THC.stride(0), v_THC.stride(0), heads * size, windows, padded,
        float_bits(scale), 0, 0,
    )  # fmt: skip
    _compiled(size, _KINDS[q_THC.dtype]).run("attend", job, windows * heads, threads)
    return y_THC
