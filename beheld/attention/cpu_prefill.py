"""Attention of prompts' tokens on a CPU in two calls, to keys and values in the paged cache.

Keys and values are packed once for all queries (cpu_prefill_ir.py). Scores, their exponentials and sums are float32,
shares are rounded to bfloat16. A query's result has the same bits however a prompt is cut into steps.

Shapes: P queries of one sequence, H query heads, K key-value heads, C head size, L known positions, N blocks.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from beheld.attention import cpu_decode
from beheld.attention import cpu_prefill_ir as ir
from beheld.attention.backend import LayerKV
from beheld.platform import host, jit
from beheld.platform.vector_ir import float_bits

# Products of numbers that one thread computes before others are worth being woken.
_FEW_PRODUCTS = 1 << 18


def attends(q_PHC: Tensor, kv: LayerKV, block_size: int) -> bool:
    """Return whether `attend` computes this layer."""
    return q_PHC.dtype == torch.bfloat16 and cpu_decode.attends(q_PHC, kv, block_size) and compiles(q_PHC.shape[2])


def compiles(size: int) -> bool:
    """Compile for heads of this size, once; return whether this processor and this LLVM have the instructions."""
    products = host.byte_products()
    return products is not None and products.bfloat16 and _known(size)


@functools.cache
def _known(size: int) -> bool:
    try:
        _compiled(size)
    except RuntimeError:
        # An LLVM that does not know the instruction; PyTorch's attention is there.
        return False
    return True


@jit.made_once
def _compiled(size: int) -> jit.CompiledModule:
    return jit.CompiledModule((functools.partial(ir.module, size),), ir.NAMES, ir.JOB)


def attend(
    q_PHC: Tensor, kv: LayerKV, table_N: Tensor, seen_2P: Tensor, known: int, scale: float, out_PHC: Tensor
) -> None:
    """Attend from each query to the positions that it sees.

    Args:
        q_PHC: heads of a row lie next to each other, rows at any distance.
        table_N: int32, the sequence's blocks.
        seen_2P: int64, the first position of each query and the stop after its last; neither falls from query to
            query, and each query sees one at least.
        known: L, the positions whose keys and values are stored.
        out_PHC: gets the result; contiguous.
    """
    rows, heads, size = q_PHC.shape
    block_size, key_heads = kv.keys.shape[1:3]
    if q_PHC.stride()[1:] != (size, 1):
        q_PHC = q_PHC.contiguous()
    first, length, tiles = int(seen_2P[0, 0]), known + -known % 16, -(-rows // ir.ROWS)
    packed = torch.empty(2, key_heads * length * size, dtype=torch.bfloat16)
    parts, few = tiles * key_heads, rows * length * heads * size < _FEW_PRODUCTS
    threads = 1 if few else min(torch.get_num_threads(), parts)
    # Rows for each thread.
    scores, zeros = torch.empty(threads * ir.ROWS * (length + ir.SPARE)), torch.zeros(max(length, size))
    job = (ctypes.c_int64 * len(ir.JOB))(
        q_PHC.data_ptr(), kv.keys.data_ptr(), kv.values.data_ptr(), table_N.data_ptr(), packed[0].data_ptr(),
        packed[1].data_ptr(), seen_2P[0].data_ptr(), seen_2P[1].data_ptr(), out_PHC.data_ptr(), scores.data_ptr(),
        zeros.data_ptr(), rows, q_PHC.stride(0), heads * size, key_heads, heads // key_heads,
        block_size.bit_length() - 1, block_size - 1, float_bits(scale), first, known, length, tiles, 0, 0,
    )  # fmt: skip
    functions = _compiled(size)
    functions.run("pack", job, key_heads * (length // 16 - first // 16), threads)
    functions.run("attend", job, parts, threads)
