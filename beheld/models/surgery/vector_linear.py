"""Linear layers in bfloat16 on a CPU, multiplied by functions compiled for it; see vector_linear_ir.py.

Measured against oneDNN's packed product, one AVX-512 core with BF16, 1024 x 5632: at 1, 4, 16 and 64 rows 98, 105, 354
and 1468 microseconds against 130, 142, 406 and 1613. The number of rows needs no padding, and a row's result has the
same bits alone and among others.

Shapes: T rows, K inputs, N outputs.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor, nn

from beheld.models import vector_linear_ir as ir
from beheld.platform import host, jit, pages
from beheld.platform.pair_products_ir import LANES
from beheld.quant.linear import linear_of

# Inputs are rounded so many at a time.
_UNIT = 16
# Weights that one thread multiplies before others are worth being woken.
_FEW_WEIGHTS = 1 << 16


@jit.made_once
def _compiled() -> jit.CompiledModule:
    return jit.CompiledModule((ir.module,), ir.NAMES, ir.JOB)


def can_multiply() -> bool:
    """Return whether this CPU sums products of bfloat16 in vectors of 16, and LLVM compiles functions that do."""
    products = host.byte_products()
    if products is None or not products.bfloat16 or not jit.available():
        return False
    try:
        _compiled()
    except RuntimeError:
        # An LLVM that does not know the instruction; oneDNN's products are there.
        return False
    return True


class VectorLinear(nn.Module):
    """A linear layer with weights of bfloat16 in the order of these products.

    Attributes:
        weight: empty; gives type and device to models that ask for them.
        packed_bytes: the bytes of the weights.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.weight = linear.weight.data.new_empty(0)
        self._packed = _packed(linear.weight.data)
        self.packed_bytes = self._packed.nbytes
        self._bias_N = torch.zeros(self._blocks * LANES)
        self._bias_of: Tensor | None = None

    @classmethod
    def fits(cls, linear: nn.Linear) -> bool:
        """Return whether a layer's type and size suit these products."""
        return linear.weight.dtype == torch.bfloat16 and linear.in_features % _UNIT == 0

    @property
    def _blocks(self) -> int:
        return self._packed.shape[0]

    def restored(self) -> nn.Linear:
        """Return a linear layer with the weights in their usual order."""
        weight_NK = self._packed.transpose(1, 2).reshape(-1, self.in_features)[: self.out_features].contiguous()
        return linear_of(weight_NK, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x (..., K) in bfloat16 -> (..., N).

        Raises:
            TypeError: x has another type.
        """
        if x.dtype != torch.bfloat16:
            raise TypeError(f"A tensor of {x.dtype} was given to a layer of bfloat16: convert it first.")
        x_TK = x.reshape(-1, self.in_features).contiguous()
        rows = x_TK.shape[0]
        y_TN = x.new_empty(rows, self.out_features)
        if rows:
            job = self._job(x_TK.data_ptr(), y_TN.data_ptr())
            job[ir.JOB.index("rows")] = rows
            few = self.in_features * self.out_features < _FEW_WEIGHTS
            _compiled().run("product_bf16", job, self._blocks, 1 if few else torch.get_num_threads())
        return y_TN.view(*x.shape[:-1], self.out_features)

    def work_bytes(self, rows: int) -> int:
        """Return the bytes that `steps` needs to hold rounded activations."""
        return 2 * rows * self.in_features

    def steps(self, x: int, kind: str, y: int, work: int, capacity: int) -> tuple[Any, list[jit.ProgramStep]]:
        """Return a job and a program's steps; see PackedWeights.steps."""
        job = self._job(work if kind == "f32" else x, y)
        multiplies = jit.ProgramStep(_compiled().address("product_f32"), job, self._blocks, True, ir.JOB.index("rows"))
        if kind != "f32":
            return job, [multiplies]
        narrows = (ctypes.c_int64 * len(ir.JOB))(x, 0, 0, work, 0, self.in_features)
        return narrows, [jit.ProgramStep(_compiled().address("narrowed"), narrows, None, True), multiplies]

    def _job(self, x: int, y: int) -> Any:
        if self._bias_of is not self.bias:
            # Joined layers come apart by losing a bias that only the joined one needed.
            self._bias_N.zero_()
            if self.bias is not None:
                self._bias_N[: self.out_features] = self.bias.data
            self._bias_of = self.bias
        return (ctypes.c_int64 * len(ir.JOB))(
            x, self._packed.data_ptr(), self._bias_N.data_ptr(), y, 0, self.in_features, self.out_features,
            self.in_features, LANES * self.in_features, self.out_features,
        )  # fmt: skip


def _packed(weight_NK: Tensor) -> Tensor:
    """Return the weights in blocks (B, K / 2, 16, 2), the last filled up with zeros."""
    outputs, inputs = weight_NK.shape
    missing = -outputs % LANES
    if missing:
        weight_NK = torch.cat([weight_NK, weight_NK.new_zeros(missing, inputs)])
    weight_NK = weight_NK.contiguous()
    if weight_NK.storage_offset() % 2:
        # A part of a larger tensor, between whose pairs it begins.
        weight_NK = weight_NK.clone()
    # A pair is moved as one number of 32 bits.
    pairs = weight_NK.view(torch.int32).view(-1, LANES, inputs // 2)
    blocks: Tensor = pages.copied(pairs.transpose(1, 2)).view(torch.bfloat16)
    return blocks.view(-1, inputs // 2, LANES, 2)
