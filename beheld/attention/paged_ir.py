"""LLVM IR that finds a position's keys or values of one head in the paged cache, for modules of attention on a CPU."""

from __future__ import annotations


def head_place(name: str, position: str, size: int) -> str:
    """Set %name.off to where the head %head of a position begins, in numbers from the cache's first.

    The module has %table, the sequence's blocks in int32, %heads, the key-value heads of a position, and for blocks of
    2^n positions %shift, which is n, and %mask, which is 2^n - 1.
    """
    return f"""
  %{name}.n = lshr i64 {position}, %shift
  %{name}.in = and i64 {position}, %mask
  %{name}.entry = getelementptr i32, ptr %table, i64 %{name}.n
  %{name}.block = load i32, ptr %{name}.entry
  %{name}.wide = zext i32 %{name}.block to i64
  %{name}.blocks = shl i64 %{name}.wide, %shift
  %{name}.slot = add i64 %{name}.blocks, %{name}.in
  %{name}.heads = mul i64 %{name}.slot, %heads
  %{name}.own = add i64 %{name}.heads, %head
  %{name}.off = mul i64 %{name}.own, {size}
"""
