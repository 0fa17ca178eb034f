"""Triton kernels of a single row: what a layer with gates does between its products.

They start early and round as those of models/one_row_kernel.py.

Shapes: M heads, V size of a head.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from beheld.models.one_row_kernel import _options
from beheld.platform.early_launch import gdc_launch_dependents, gdc_wait


@triton.jit
def _gated(
    x_ptr,
    gate_ptr,
    weight_ptr,
    y_ptr,
    size,
    apart,
    eps,
    V: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program gates a head, whose gate begins `apart` elements from the previous head's.

    With weights, it is normalized first and multiplied by SiLU of its gate; without, by the gate's sigmoid.
    """
    if EARLY:
        gdc_launch_dependents()
    head = tl.program_id(0)
    v_V = tl.arange(0, V)
    inside_V = v_V < size
    if weight_ptr is not None:
        w_V = tl.load(weight_ptr + v_V, mask=inside_V, other=0.0).to(tl.float32)
    if EARLY:
        gdc_wait()
    x_V = tl.load(x_ptr + head * size + v_V, mask=inside_V, other=0.0).to(tl.float32)
    g_V = tl.load(gate_ptr + head * apart + v_V, mask=inside_V, other=0.0).to(tl.float32)
    open_V = 1.0 / (1.0 + tl.exp(tl.minimum(-g_V, 80.0)))
    if weight_ptr is not None:
        x_V *= tl.rsqrt(tl.sum(x_V * x_V, 0) / size + eps)
        x_V = x_V.to(y_ptr.dtype.element_ty).to(tl.float32) * w_V
        y_V = x_V.to(y_ptr.dtype.element_ty).to(tl.float32) * (g_V * open_V)
    else:
        y_V = x_V * open_V.to(y_ptr.dtype.element_ty).to(tl.float32)
    tl.store(y_ptr + head * size + v_V, y_V.to(y_ptr.dtype.element_ty), mask=inside_V)


def gated_norm(x_MV: Tensor, gate_MV: Tensor, weight_V: Tensor, eps: float, *, early: bool) -> Tensor:
    """Return the RMS norm of each head times SiLU of its gate, (M * V,)."""
    return _launched(x_MV, gate_MV, weight_V, eps, early)


def sigmoid_gated(x_MV: Tensor, gate_MV: Tensor, *, early: bool) -> Tensor:
    """Return each head times the sigmoid of its gate, (M * V,)."""
    return _launched(x_MV, gate_MV, None, 0.0, early)


def _launched(x_MV: Tensor, gate_MV: Tensor, weight_V: Tensor | None, eps: float, early: bool) -> Tensor:
    """Heads are contiguous, and each gate is."""
    assert x_MV.is_contiguous()
    assert gate_MV.stride(1) == 1
    heads, size = x_MV.shape
    y = torch.empty_like(x_MV)
    given = x_MV, gate_MV, weight_V, y, size, gate_MV.stride(0), eps
    _gated[(heads,)](*given, triton.next_power_of_2(size), early, num_warps=1, enable_fp_fusion=True, **_options(early))
    return y.view(-1)
