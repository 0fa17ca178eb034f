"""RMS norms of bfloat16 on a CPU, each one function compiled from LLVM IR, where PyTorch takes eight operations.

Shapes: T rows, H hidden size.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from typing import Any

import torch
from torch import Tensor, nn

from beheld.models.surgery.linears import replace_children
from beheld.models.surgery.operation import Changes
from beheld.platform import host, jit
from beheld.platform.vector_ir import stored, to_bfloat16

_WORDS = ("x", "weight", "y", "inputs", "epsilon", *jit.SHARED_WORDS)
_LANES = 16
# Numbers that one thread normalizes before others are worth being woken.
_FEW_NUMBERS = 1 << 16
# Rows of the trial, and the share of numbers that may round to another neighbor: sums have another order.
_TRIED, _OTHERS = 16, 0.01


class FusedNorm(nn.Module):
    """An RMS norm: x / sqrt(mean(x^2) + epsilon), rounded to bfloat16, times the weight."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight = norm.weight
        self.variance_epsilon = _epsilon(norm) or 0.0
        self.__dict__["_norm"] = norm
        self._bits = struct.unpack("<i", struct.pack("<f", self.variance_epsilon))[0]

    def restored(self) -> nn.Module:
        """Return the norm."""
        norm: nn.Module = self.__dict__["_norm"]
        return norm

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalize (..., H) -> (..., H)."""
        if hidden_states.dtype != self.weight.dtype or hidden_states.shape[-1] != len(self.weight):
            # The compiled function would read other bytes than there are.
            found: Tensor = self.__dict__["_norm"](hidden_states)
            return found
        x = hidden_states.contiguous()
        y, inputs = torch.empty_like(x), x.shape[-1]
        rows = x.numel() // inputs
        if rows:
            job = (ctypes.c_int64 * len(_WORDS))(
                x.data_ptr(), self.weight.data_ptr(), y.data_ptr(), inputs, self._bits, 0, 0
            )
            threads = torch.get_num_threads() if x.numel() > _FEW_NUMBERS else 1
            compiled_norm().run("norm", job, rows, threads)
        return y


def fuse_norms(model: nn.Module, changes: Changes) -> int:
    """Replace the RMS norms in bfloat16 for which a trial gives the same numbers; returns how many."""

    def made(child: Any) -> nn.Module | None:
        weight = getattr(child, "weight", None)
        if not type(child).__name__.endswith("RMSNorm") or _epsilon(child) is None or not isinstance(weight, Tensor):
            return None
        if weight.dtype != torch.bfloat16 or weight.dim() != 1 or len(weight) % _LANES or not weight.is_contiguous():
            return None
        fused = FusedNorm(child)
        return fused if _alike(child, fused, len(weight)) else None

    return replace_children(model, made, changes)


def _epsilon(norm: Any) -> float | None:
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


@torch.no_grad()
def _alike(norm: nn.Module, fused: FusedNorm, inputs: int) -> bool:
    """Return whether both give the same numbers, except for a few that round to the other neighbor."""
    x_TH = torch.arange(_TRIED * inputs, dtype=torch.float32).sin().mul_(3).view(_TRIED, inputs).bfloat16()
    wanted, found = norm(x_TH), fused(x_TH)
    if wanted.dtype != torch.bfloat16:
        return False
    near = torch.allclose(found.float(), wanted.float(), rtol=2.0**-6, atol=1e-30)
    return near and float((found != wanted).float().mean()) <= _OTHERS


@jit.made_once
def compiled_norm() -> jit.CompiledModule:
    """Return the function `norm`."""
    products = host.byte_products()
    in_hardware = products is not None and products.bfloat16
    return jit.CompiledModule((functools.partial(_module, in_hardware),), ("norm",), _WORDS)


def _module(in_hardware: bool, triple: str) -> str:
    """Return the IR; `in_hardware`: whether one instruction rounds a vector to bfloat16."""
    loads = "\n".join(
        f"  %{name}.at = getelementptr i64, ptr %job, i64 {_WORDS.index(name)}\n  %{name} = load {kind}, ptr %{name}.at"
        for name, kind in {"x": "ptr", "weight": "ptr", "y": "ptr", "inputs": "i64", "epsilon": "float"}.items()
    )
    return f"""
target triple = "{triple}"
declare <16 x float> @llvm.fmuladd.v16f32(<16 x float>, <16 x float>, <16 x float>)
declare float @llvm.vector.reduce.fadd.v16f32(float, <16 x float>)
declare float @llvm.sqrt.f32(float)
{jit.sharing(_WORDS)}
define void @norm(ptr %job, i64 %first, i64 %stop) {{
entry:
{loads}
  %inputs.float = uitofp i64 %inputs to float
  %none = icmp uge i64 %first, %stop
  br i1 %none, label %done, label %row
row:
  %r = phi i64 [%first, %entry], [%r.next, %row.end]
  %start = mul i64 %r, %inputs
  %x.row = getelementptr bfloat, ptr %x, i64 %start
  %y.row = getelementptr bfloat, ptr %y, i64 %start
  br label %squares
squares:
  %c = phi i64 [0, %row], [%c.next, %squares]
  %sum = phi <16 x float> [zeroinitializer, %row], [%sum.next, %squares]
  %a.at = getelementptr bfloat, ptr %x.row, i64 %c
  %a.raw = load <16 x bfloat>, ptr %a.at, align 2
  %a = fpext <16 x bfloat> %a.raw to <16 x float>
  %sum.next = call <16 x float> @llvm.fmuladd.v16f32(<16 x float> %a, <16 x float> %a, <16 x float> %sum)
  %c.next = add i64 %c, 16
  %more = icmp ult i64 %c.next, %inputs
  br i1 %more, label %squares, label %scale
scale:
  %total = call reassoc float @llvm.vector.reduce.fadd.v16f32(float 0.0, <16 x float> %sum.next)
  %mean = fdiv float %total, %inputs.float
  %square = fadd float %mean, %epsilon
  %root = call float @llvm.sqrt.f32(float %square)
  %factor = fdiv float 1.0, %root
  %factor.one = insertelement <16 x float> poison, float %factor, i64 0
  %factor.all = shufflevector <16 x float> %factor.one, <16 x float> poison, <16 x i32> zeroinitializer
  br label %products
products:
  %d = phi i64 [0, %scale], [%d.next, %products]
  %b.at = getelementptr bfloat, ptr %x.row, i64 %d
  %b.raw = load <16 x bfloat>, ptr %b.at, align 2
  %b = fpext <16 x bfloat> %b.raw to <16 x float>
  %scaled = fmul <16 x float> %b, %factor.all
{to_bfloat16(_LANES, in_hardware, "%short.bits", "%scaled")}
  %short = bitcast <16 x i16> %short.bits to <16 x bfloat>
  %wide = fpext <16 x bfloat> %short to <16 x float>
  %w.at = getelementptr bfloat, ptr %weight, i64 %d
  %w.raw = load <16 x bfloat>, ptr %w.at, align 2
  %w = fpext <16 x bfloat> %w.raw to <16 x float>
  %product = fmul <16 x float> %wide, %w
{stored("bf16", in_hardware, "%product", "%y.row", "%d", "out")}
  %d.next = add i64 %d, 16
  %again = icmp ult i64 %d.next, %inputs
  br i1 %again, label %products, label %row.end
row.end:
  %r.next = add i64 %r, 1
  %left = icmp ult i64 %r.next, %stop
  br i1 %left, label %row, label %done
done:
  ret void
}}
"""
