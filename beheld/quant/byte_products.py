"""Products of grouped weights on a CPU, compiled by LLVM (platform/jit.py) at their first use; see byte_products_ir.py.

Shapes: T rows of x, N outputs, K inputs, G groups, B blocks of L outputs.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from beheld.platform import host, jit, pages
from beheld.platform.host import ByteProducts
from beheld.quant.byte_products_ir import JOB, module
from beheld.quant.grouped import BITS, GROUP_UNIT, check_greatest
from beheld.quant.rounding_ir import JOB as ROUNDING_JOB
from beheld.quant.rounding_ir import module as rounding_module

KINDS = {torch.float32: "f32", torch.bfloat16: "bf16"}
# Numbers that one thread rounds, and weights that it multiplies, before others are worth being woken.
_FEW_NUMBERS, _FEW_WEIGHTS = 1 << 15, 1 << 16
# The most weights that one call rounds, and the fewest for which waking further threads pays.
_PIECE, _SHARE = 1 << 23, 1 << 18
# Scales that are brought in order at a time: few enough that PyTorch does it in one thread.
_SCALES = 1 << 14


@jit.made_once
def compiled(products: ByteProducts, kind: str) -> jit.CompiledModule:
    """Return the functions for a way to sum products of bytes, and a type of activations."""
    names = [f"{act}_{kind}" for act in ("rounded", "product_4", "product_8")]
    texts = [functools.partial(module, products, kind, older) for older in (False, True)]
    return jit.CompiledModule(texts, names, JOB)


@jit.made_once
def compiled_rounding(lanes: int, kind: str) -> jit.CompiledModule:
    """Return the functions that round weights of a type, in blocks of so many outputs."""
    names = [f"weights_{bits}_{kind}" for bits in BITS]
    return jit.CompiledModule([functools.partial(rounding_module, lanes, kind)], names, ROUNDING_JOB)


def rounds(inputs: int, dtype: torch.dtype) -> bool:
    """Return whether `rounded_rows` takes rows of this length and type here."""
    return inputs % GROUP_UNIT == 0 and dtype in KINDS and _products() is not None


def _products() -> ByteProducts | None:
    return host.byte_products() if jit.available() else None


def rounded_rows(x_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Return whole numbers plus 128 in uint8 (T, K), and steps in float32 (T, 1); each row's largest becomes 127."""
    rows, inputs = x_TK.shape
    whole_TK = torch.empty((rows, inputs), dtype=torch.uint8)
    step_T2 = torch.empty((2, rows, 1))
    products, kind = _products(), KINDS[x_TK.dtype]
    assert products is not None, "see `rounds`"
    if rows:
        start = step_T2.data_ptr()
        job = (ctypes.c_int64 * len(JOB))(
            x_TK.data_ptr(), whole_TK.data_ptr(), start, start + 4 * rows, 0, 0, 0, 0, 0,
            rows, inputs, 1, inputs, 0, 128, 0, 0,
        )  # fmt: skip
        threads = torch.get_num_threads() if rows * inputs > _FEW_NUMBERS else 1
        compiled(products, kind).run(f"rounded_{kind}", job, rows, threads)
    return whole_TK, step_T2[0]


class PackedWeights:
    """Grouped weights in the order of these products.

    Args:
        numbers_NK: whole numbers in uint8, below 2 ** bits.
        scale_NG, low_NG: float32.
        products: how products of bytes are summed; None for the best that this CPU has.
    """

    # Whether they are where `use_pages` moves them.
    _in_pages = False

    def __init__(
        self,
        numbers_NK: Tensor,
        scale_NG: Tensor,
        low_NG: Tensor,
        bits: int,
        products: ByteProducts | None = None,
    ) -> None:
        found = products or host.byte_products()
        assert found is not None, "refused before weights are read"
        self.bits, self.products, self.lanes = bits, found, found.lanes
        self.outputs, self.inputs = numbers_NK.shape
        self.groups = scale_NG.shape[1]
        padded = self.outputs + -self.outputs % self.lanes
        self.packed = _packed(_grown(numbers_NK, padded), bits, self.lanes)
        self._set_scales(scale_NG, low_NG)

    def _set_scales(self, scale_NG: Tensor, low_NG: Tensor) -> None:
        """Set scales and lows, and no bias."""
        blocks = -(-self.outputs // self.lanes)
        self.factor_N = torch.empty(blocks * self.lanes)
        self.scales_BG2L = torch.empty(blocks, self.groups, 2, self.lanes, dtype=torch.float16)
        self._bias_N = torch.zeros(blocks * self.lanes)
        # Some blocks at a time: those of a large vocabulary would take a third of what its weights take.
        step = max(1, _SCALES // (self.groups * self.lanes))
        for first in range(0, blocks, step):
            outputs = slice(first * self.lanes, (first + step) * self.lanes)
            factor_N, scales_BG2L = self._shared_scales(scale_NG[outputs], low_NG[outputs])
            self.factor_N[outputs] = factor_N
            self.scales_BG2L[first : first + step] = scales_BG2L

    def _shared_scales(self, scale_NG: Tensor, low_NG: Tensor) -> tuple[Tensor, Tensor]:
        """Return a factor for each output, and scales and lows by block without it."""
        padded = len(scale_NG) + -len(scale_NG) % self.lanes
        # Powers of two, so that float16 holds the scales with all of its bits whatever their size.
        largest_N = torch.maximum(scale_NG.abs(), low_NG.abs() / 256).amax(1).clamp_(min=2.0**-100)
        factor_N = _grown(torch.exp2(largest_N.log2().ceil()), padded)
        both_NG2 = torch.stack([_grown(each, padded) for each in (scale_NG, low_NG)], -1)
        both_NG2 /= torch.where(factor_N > 0, factor_N, 1.0).view(-1, 1, 1)
        both_BLG2 = both_NG2.view(-1, self.lanes, self.groups, 2)
        return factor_N, both_BLG2.permute(0, 2, 3, 1).to(torch.float16)

    @classmethod
    def rounded(
        cls,
        weight_NK: Tensor,
        bits: int,
        group: int,
        products: ByteProducts | None = None,
        threads: int | None = None,
        read: Callable[[Tensor], object] | None = None,
    ) -> PackedWeights:
        """Round weights in groups of this size, as `rounded` in grouped.py does, right into this order.

        Args:
            weight_NK: of any type and strides; what is neither float32 nor bfloat16 or not contiguous is copied, some
                outputs at a time.
            threads: the most that round it; None for as many as PyTorch has.
            read: is called with each piece of the weights after it was read, by one of several threads.

        Raises:
            ModelError: a weight is NaN or infinity, or comes near it.
        """
        made = cls.__new__(cls)
        found = products or host.byte_products()
        assert found is not None, "refused before weights are read"
        made.bits, made.products, made.lanes = bits, found, found.lanes
        made.outputs, made.inputs = weight_NK.shape
        made.groups = made.inputs // group
        blocks, block_bytes = -(-made.outputs // made.lanes), made.inputs * made.lanes * bits // 8
        # Lanes without an output are not written.
        make: Callable[..., Tensor] = torch.empty if made.outputs % made.lanes == 0 else torch.zeros
        if blocks * block_bytes > pages.OWN:
            # Pages of their own, which go with them.
            make, made._in_pages = pages.empty, True
        made.packed = make((blocks * block_bytes,), dtype=torch.uint8)
        scale_NG, low_NG = (torch.empty(made.outputs, made.groups) for _ in range(2))
        greatest_N = torch.empty(made.outputs)
        as_is = weight_NK.is_contiguous() and weight_NK.dtype in KINDS
        threads = max(1, min(threads or torch.get_num_threads(), weight_NK.numel() // _SHARE))
        shares = threads * -(-weight_NK.numel() // _PIECE)
        outputs = -(-blocks // shares) * made.lanes

        def bring(first: int) -> None:
            piece = weight_NK[first : first + outputs]
            given = piece if as_is else piece.float().contiguous()
            job = (ctypes.c_int64 * len(ROUNDING_JOB))(
                given.data_ptr(), made.packed.data_ptr() + first // made.lanes * block_bytes,
                scale_NG[first:].data_ptr(), low_NG[first:].data_ptr(), greatest_N[first:].data_ptr(),
                made.inputs, made.groups, group, len(given), 0, 0,
            )  # fmt: skip
            kind = KINDS[given.dtype]
            functions = compiled_rounding(made.lanes, kind)
            functions.run(f"weights_{bits}_{kind}", job, -(-len(given) // made.lanes), 1)
            if read is not None:
                read(piece)

        starts = range(0, made.outputs, outputs)
        if threads == 1:
            for first in starts:
                bring(first)
        else:
            # Not OpenMP's threads: on a busy machine one that waits would keep its core from the one it waits for.
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(bring, starts))
        check_greatest(greatest_N)
        made._set_scales(scale_NG, low_NG)
        return made

    @staticmethod
    def can_join(parts: Sequence[PackedWeights]) -> bool:
        """Return whether the outputs of all parts but the last fill their blocks."""
        return all(part.outputs % part.lanes == 0 for part in parts[:-1])

    @classmethod
    def joined(cls, parts: Iterable[PackedWeights], outputs: int) -> PackedWeights:
        """Join weights of one form, so many outputs in order, without bias; see `can_join`."""
        made, first_block = cls.__new__(cls), 0
        for part in parts:
            if not first_block:
                made.bits, made.products, made.lanes, made.groups = part.bits, part.products, part.lanes, part.groups
                made.outputs, made.inputs = outputs, part.inputs
                blocks = -(-outputs // part.lanes)
                made.packed = pages.empty((blocks * part.inputs * part.lanes * part.bits // 8,), torch.uint8)
                made.factor_N = part.factor_N.new_empty(blocks * part.lanes)
                made.scales_BG2L = pages.empty((blocks, *part.scales_BG2L.shape[1:]), torch.float16)
            stop = first_block + part.scales_BG2L.shape[0]
            for name in ("packed", "factor_N", "scales_BG2L"):
                getattr(made, name).view(blocks, -1)[first_block:stop] = getattr(part, name).view(
                    stop - first_block, -1
                )
            first_block = stop
        assert first_block == blocks, "a block has outputs of one part"
        made._bias_N = torch.zeros(len(made.factor_N))
        made._in_pages = True
        return made

    def use_pages(self) -> None:
        """Move weights that stay as they are to memory that is read faster, unless they are there; see pages.py."""
        if not self._in_pages:
            self.packed, self.scales_BG2L = pages.copied(self.packed), pages.copied(self.scales_BG2L)
            self._in_pages = True

    @property
    def num_bytes(self) -> int:
        """Return the bytes of numbers, scales and lows."""
        return self.packed.numel() + 2 * self.scales_BG2L.numel() + 8 * len(self.factor_N)

    def set_bias(self, bias_N: Tensor | None) -> None:
        """Let products add a bias."""
        self._bias_N.zero_()
        if bias_N is not None:
            self._bias_N[: self.outputs] = bias_N

    def unpacked(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return whole numbers, scales and lows."""
        numbers_NK = _unpacked(self.packed, self.bits, self.lanes, self.inputs)[: self.outputs]
        both_NG2 = self.scales_BG2L.float().permute(0, 3, 1, 2).reshape(-1, self.groups, 2)
        both_NG2 *= self.factor_N.view(-1, 1, 1)
        scale_NG, low_NG = (each[: self.outputs].contiguous() for each in both_NG2.unbind(-1))
        return numbers_NK, scale_NG, low_NG

    def work_bytes(self, rows: int) -> int:
        """Return the bytes that `steps` needs to hold rounded activations."""
        return rows * (self.inputs + 8 * self.groups)

    def steps(self, x: int, kind: str, y: int, work: int, capacity: int) -> tuple[Any, list[jit.ProgramStep]]:
        """Return a job, whose first word is the address of x, and a program's steps that compute y (T, N) of x (T, K).

        Args:
            x, kind: the address of activations, and their type, "f32" or "bf16".
            y: the address of the product, in float32.
            work: the address of `work_bytes(capacity)` bytes.
            capacity: the most rows.
        """
        groups = capacity * self.groups
        job = (ctypes.c_int64 * len(JOB))(
            x, work + 8 * groups, work, work + 4 * groups, self.packed.data_ptr(),
            self.scales_BG2L.data_ptr(), self.factor_N.data_ptr(), self._bias_N.data_ptr(), y,
            0, self.inputs, self.groups, self.inputs // self.groups, self.outputs, 0, 0, 0,
        )  # fmt: skip
        rounds = compiled(self.products, kind).address(f"rounded_{kind}")
        multiplies = compiled(self.products, "f32").address(f"product_{self.bits}_f32")
        blocks = len(self.factor_N) // self.lanes
        rows = JOB.index("rows")
        return job, [jit.ProgramStep(rounds, job, None, True), jit.ProgramStep(multiplies, job, blocks, True, rows)]

    def product(self, x_TK: Tensor) -> Tensor:
        """Return x W^T + bias, (T, N), in the type of x, which is float32 or bfloat16 and contiguous."""
        kind = KINDS[x_TK.dtype]
        functions = compiled(self.products, kind)
        rows = x_TK.shape[0]
        y_TN = x_TK.new_empty((rows, self.outputs))
        if not rows:
            return y_TN
        numbers, groups = rows * self.inputs, rows * self.groups
        work = torch.empty(numbers + 8 * groups, dtype=torch.uint8)
        start = work.data_ptr()
        # Steps and sums first: float32 must be aligned.
        job = (ctypes.c_int64 * len(JOB))(
            x_TK.data_ptr(), start + 8 * groups, start, start + 4 * groups, self.packed.data_ptr(),
            self.scales_BG2L.data_ptr(), self.factor_N.data_ptr(), self._bias_N.data_ptr(), y_TN.data_ptr(),
            rows, self.inputs, self.groups, self.inputs // self.groups, self.outputs, 0, 0, 0,
        )  # fmt: skip
        threads = torch.get_num_threads()
        functions.run(f"rounded_{kind}", job, rows, threads if numbers > _FEW_NUMBERS else 1)
        weights = self.inputs * self.outputs
        blocks = len(self.factor_N) // self.lanes
        functions.run(f"product_{self.bits}_{kind}", job, blocks, threads if weights > _FEW_WEIGHTS else 1)
        return y_TN


def _grown(tensor: Tensor, outputs: int) -> Tensor:
    """Return the tensor with zeros up to this many outputs."""
    missing = outputs - tensor.shape[0]
    return tensor if not missing else torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])])


def _packed(numbers_NK: Tensor, bits: int, num_lanes: int) -> Tensor:
    """Return bytes in the order that byte_products_ir.py states."""
    outputs, inputs = numbers_NK.shape
    if bits == 8:
        return numbers_NK.view(outputs // num_lanes, num_lanes, inputs // 4, 4).transpose(1, 2).contiguous().flatten()
    eights = numbers_NK.view(outputs // num_lanes, num_lanes, inputs // 8, 2, 4)
    return (eights[:, :, :, 0] | (eights[:, :, :, 1] << 4)).transpose(1, 2).contiguous().flatten()


def _unpacked(packed: Tensor, bits: int, num_lanes: int, inputs: int) -> Tensor:
    """Return whole numbers (N, K) of `_packed`'s."""
    if bits == 8:
        fours = packed.view(-1, inputs // 4, num_lanes, 4)
        return fours.transpose(1, 2).reshape(-1, inputs)
    eights = packed.view(-1, inputs // 8, num_lanes, 4).transpose(1, 2)
    return torch.stack([eights & 15, eights >> 4], -2).reshape(-1, inputs)
