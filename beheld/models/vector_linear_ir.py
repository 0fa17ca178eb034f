"""LLVM IR of a product with weights of bfloat16 on a CPU that sums products of pairs of them in one instruction.

Weights lie as platform/pair_products_ir.py states. A job is a list of 64-bit words, see JOB. X is the type of the
result, "f32" or "bf16":

    narrowed(job, row, stop)        y in bfloat16 = x in float32
    product_X(job, block, stop)     some blocks of outputs y of x in bfloat16, for all rows
"""

from __future__ import annotations

from beheld.platform import pair_products_ir
from beheld.platform.jit import SHARED_WORDS, sharing
from beheld.platform.vector_ir import load, stored, words

JOB = (*pair_products_ir.WORDS, *SHARED_WORDS)
NAMES = ("narrowed", "product_f32", "product_bf16")


def module(triple: str) -> str:
    """Return the text of the module."""
    kinds = [pair_products_ir.products(kind, asks=True) for kind in ("f32", "bf16")]
    target = f'target triple = "{triple}"'
    return "\n".join([target, pair_products_ir.DECLARED, _narrowed(), *kinds, sharing(JOB)])


def _narrowed() -> str:
    return f"""
define void @narrowed(ptr %job, i64 %first, i64 %stop) {{
entry:
{words(JOB, pair_products_ir.POINTERS, "x", "y", "inputs")}
  %from = mul i64 %first, %inputs
  %to = mul i64 %stop, %inputs
  %none = icmp uge i64 %from, %to
  br i1 %none, label %done, label %within
within:
  %k = phi i64 [%from, %entry], [%k.next, %within]
{load("a", "f32", "%x", "%k")}{stored("bf16", True, "%a", "%y", "%k", "out")}
  %k.next = add i64 %k, 16
  %more = icmp ult i64 %k.next, %to
  br i1 %more, label %within, label %done
done:
  ret void
}}
"""
