"""RMS norms on a CPU, each one function compiled from LLVM IR, where PyTorch takes five to eight operations.

Shapes: T rows, H hidden size.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor, nn

from beheld.models.surgery.linears import replace_children
from beheld.models.surgery.operation import Changes
from beheld.platform import host, jit
from beheld.platform.vector_ir import TYPES, float_bits, load, stored, to_bfloat16

_WORDS = ("x", "weight", "y", "inputs", "epsilon", *jit.SHARED_WORDS)
_LANES = 16
# Numbers that one thread normalizes before others are worth being woken.
_FEW_NUMBERS = 1 << 16
# Rows of the trial, and, in bfloat16, the share of numbers that may round to another neighbor: sums have another order.
_TRIED, _OTHERS = 16, 0.01
_KINDS = {torch.bfloat16: "bf16", torch.float32: "f32"}
# How far numbers of the trial may be apart, relative to their size.
_APART = {"bf16": 2.0**-6, "f32": 2.0**-19}


class FusedNorm(nn.Module):
    """An RMS norm: x / sqrt(mean(x^2) + epsilon), rounded to the type of x, times the weight."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight = norm.weight
        self.variance_epsilon = _epsilon(norm) or 0.0
        self.__dict__["_norm"] = norm
        self._bits = float_bits(self.variance_epsilon)
        self._kind = _KINDS[norm.weight.dtype]

    def restored(self) -> nn.Module:
        """Return the norm."""
        norm: nn.Module = self.__dict__["_norm"]
        return norm

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalize (..., H) -> (..., H)."""
        x = hidden_states.contiguous()
        y, inputs = torch.empty_like(x), x.shape[-1]
        rows = x.numel() // inputs
        if rows:
            job = (ctypes.c_int64 * len(_WORDS))(
                x.data_ptr(), self.weight.data_ptr(), y.data_ptr(), inputs, self._bits, 0, 0
            )
            threads = torch.get_num_threads() if x.numel() > _FEW_NUMBERS else 1
            compiled_norm(self._kind).run("norm", job, rows, threads)
        return y


def fuse_norms(model: nn.Module, changes: Changes) -> int:
    """Replace the RMS norms in bfloat16 or float32 for which a trial gives the same numbers; returns how many."""

    def made(child: Any) -> nn.Module | None:
        weight = getattr(child, "weight", None)
        if not _named(child) or _epsilon(child) is None or not isinstance(weight, Tensor):
            return None
        if weight.dtype not in _KINDS or weight.dim() != 1 or len(weight) % _LANES or not weight.is_contiguous():
            return None
        fused = FusedNorm(child)
        return fused if _alike(child, fused, len(weight)) else None

    return replace_children(model, made, changes)


def _named(norm: Any) -> bool:
    """Return whether a module's name says that it may be an RMS norm: T5 and its relatives call theirs LayerNorm."""
    name = type(norm).__name__
    return name.endswith("RMSNorm") or (name.endswith("LayerNorm") and hasattr(norm, "variance_epsilon"))


def _epsilon(norm: Any) -> float | None:
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


@torch.no_grad()
def _alike(norm: nn.Module, fused: FusedNorm, inputs: int) -> bool:
    """Return whether both give the same numbers, except for a few that round to the other neighbor."""
    # The mean is not zero: a norm that subtracts it gives other numbers.
    x_TH = torch.arange(_TRIED * inputs, dtype=torch.float32).sin().mul_(3).add_(1).view(_TRIED, inputs)
    dtype = fused.weight.dtype
    x_TH = x_TH.to(dtype)
    wanted, found = norm(x_TH), fused(x_TH)
    if wanted.dtype != dtype or not torch.allclose(
        found.float(), wanted.float(), rtol=_APART[_KINDS[dtype]], atol=1e-30
    ):
        return False
    return dtype == torch.float32 or float((found != wanted).float().mean()) <= _OTHERS


@jit.made_once
def compiled_norm(kind: str) -> jit.CompiledModule:
    """Return the function `norm` for numbers of a kind, "bf16" or "f32"."""
    products = host.byte_products()
    in_hardware = products is not None and products.bfloat16
    return jit.CompiledModule((functools.partial(_module, kind, in_hardware),), ("norm",), _WORDS)


def _module(kind: str, in_hardware: bool, triple: str) -> str:
    """Return the IR; `in_hardware`: whether one instruction rounds a vector to bfloat16."""
    type_, normalized = TYPES[kind], "%scaled"
    rounds = ""
    if kind == "bf16":
        normalized = "%wide"
        rounds = (
            to_bfloat16(_LANES, in_hardware, "%short.bits", "%scaled")
            + """
  %short = bitcast <16 x i16> %short.bits to <16 x bfloat>
  %wide = fpext <16 x bfloat> %short to <16 x float>"""
        )
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
  %x.row = getelementptr {type_}, ptr %x, i64 %start
  %y.row = getelementptr {type_}, ptr %y, i64 %start
  br label %squares
squares:
  %c = phi i64 [0, %row], [%c.next, %squares]
  %sum = phi <16 x float> [zeroinitializer, %row], [%sum.next, %squares]
{load("a", kind, "%x.row", "%c")}
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
{load("b", kind, "%x.row", "%d")}
  %scaled = fmul <16 x float> %b, %factor.all
{rounds}
{load("w", kind, "%weight", "%d")}
  %product = fmul <16 x float> {normalized}, %w
{stored(kind, in_hardware, "%product", "%y.row", "%d", "out")}
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
