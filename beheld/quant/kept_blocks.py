"""Keeps FP8 weights with a scale for each block as they are stored, for the methods that have such.

Weights go through transformers' loader as rows of bytes (row_bytes.py), a row's numbers and then its scales, and layers
multiply them (float8_block.py).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from beheld.parallel.shards import Cut
from beheld.platform.registry import platform_of
from beheld.quant import row_bytes
from beheld.quant.dequantize import LazyWeight
from beheld.quant.float8 import FP8
from beheld.quant.float8_block import ALIGNED, GROUPS, BlockFloat8Experts, BlockFloat8Linear, BlockNumbers
from beheld.quant.linear import StoredExperts, StoredLinear
from beheld.quant.method import Replace, StorageTarget
from beheld.quant.row_bytes import Kept, LoadedRows
from beheld.quant.stored_as import Axis, StoredAs
from beheld.utils import env
from beheld.utils.log import get_logger

logger = get_logger(__name__)


def scaled(weight: Tensor, scale: Tensor, blocks: Sequence[int] | None) -> Tensor:
    """Return the numbers of a weight (..., N, K) in float32; without blocks the scale is one number."""
    numbers, scale = weight.float(), scale.float()
    if blocks is None:
        return numbers.mul_(scale)
    height, width = blocks
    # Scales of all inputs first, for a row of blocks at a time.
    scale = scale.repeat_interleave(width, dim=-1)[..., : numbers.shape[-1]]
    for row in range(scale.shape[-2]):
        numbers[..., row * height : (row + 1) * height, :].mul_(scale[..., row : row + 1, :])
    return numbers


class LazyBlocks(LazyWeight):
    """An FP8 weight with a scale for each block, read on use: as rows, or dequantized.

    Attributes:
        shape: N and K.
        blocks: outputs and inputs of a block.
    """

    def __init__(self, parts: Mapping[str, Any], device: str, shape: Sequence[int], blocks: Sequence[int]) -> None:
        """Make the weight of the entries `weight` and `scale`."""
        axes = {"weight": (Axis(0), Axis(1)), "scale": (Axis(0, blocks[0]), Axis(1, blocks[1]))}
        stored = StoredAs((shape[0], shape[1]), axes)
        super().__init__(parts, functools.partial(scaled, blocks=blocks), device, stored)
        self.shape, self.blocks = stored.shape, (blocks[0], blocks[1])

    def rank_part(self, cut: Cut) -> Self | None:
        """Return what a rank holds; see LazyWeight."""
        made = super().rank_part(cut)
        if made is not None and made._stored is not None:
            made.shape = made._stored.shape
        return made

    def fields(self) -> Sequence[Tensor]:
        """Return FP8 numbers (N, K) and their scales, (N, G) in float32; see row_bytes.StoredWeight."""
        weight_NK, scale_BG = self._parts["weight"][...], self._parts["scale"][...].float()
        return weight_NK, scale_BG.repeat_interleave(self.blocks[0], dim=0)[: weight_NK.shape[0]]


def lazy_blocks(parts: Mapping[str, Any], device: str, shape: Sequence[int], blocks: Sequence[int]) -> LazyWeight:
    """Return an FP8 weight (..., N, K) of the entries `weight` and `scale`; merged experts are always dequantized."""
    if len(shape) == 2:
        return LazyBlocks(parts, device, shape, blocks)
    return LazyWeight(parts, functools.partial(scaled, blocks=blocks), device)


class KeptBlocks:
    """See row_bytes.RowForm; also the parts of QuantMethod that differ if weights are kept.

    Attributes:
        objection: why weights are not kept as stored, in words; None if they are kept.
    """

    def __init__(self, target: StorageTarget, further: str | None = None) -> None:
        """Keep weights for this target, unless there is a `further` objection."""
        self._dtype = target.dtype
        self.objection = objection(target) or further

    def loading(self, model_class: Any, weights: dict[str, Any]) -> Any:
        """Return a class with room for the rows of weights that are kept."""
        logger.info(
            "FP8 weights stay as they are; products are of FP8 numbers, activations rounded by token and group "
            "(BEHELD_FP8=0 dequantizes)."
        )
        return row_bytes.keeping(model_class, weights, self)

    def settle(self, model: Any, model_class: Any, replace: Replace) -> None:
        """Separate rows from their scales and insert layers that multiply them."""
        log_kept(row_bytes.settle(model, model_class, self, replace))

    def stored_bytes(self, weights: Mapping[str, Any], model: Any) -> int:
        """Return the bytes of a model on the meta device whose FP8 weights are kept, of weights by name."""
        total = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        for weight in weights.values():
            if isinstance(weight, LazyBlocks) and _fits(weight.shape, weight.blocks):
                (outputs, inputs), (height, width) = weight.shape, weight.blocks
                total -= outputs * inputs * (self._dtype.itemsize - FP8.itemsize)
                rows = outputs if outputs % height else outputs // height
                total += rows * (inputs // width) * torch.float32.itemsize
        return int(total)

    # ------------------------------------------------------------------ rows, see row_bytes.RowForm

    def layout(self, weight: Any, inputs: int) -> Sequence[tuple[torch.dtype, int]]:
        """Return the fields of a row: its numbers, then its scales."""
        return (FP8, inputs), (torch.float32, inputs // weight.blocks[1])

    def takes(self, parameter: Tensor, weights: Sequence[Any]) -> bool:
        """Return whether all weights have blocks of one size, which products accept."""
        blocks = {getattr(weight, "blocks", None) for weight in weights}
        own = blocks.pop()
        return own is not None and not blocks and _fits(parameter.shape[-2:], own)

    def linear(self, rows: LoadedRows, bias_N: Tensor | None) -> StoredLinear:
        """Make a linear layer that multiplies FP8."""
        return BlockFloat8Linear(_numbers(rows), bias_N, self._dtype)

    def experts(self, shell: nn.Module, gate_up: LoadedRows, down: LoadedRows) -> StoredExperts:
        """Make experts that multiply FP8."""
        return BlockFloat8Experts(shell, _numbers(gate_up), _numbers(down), self._dtype)


def log_kept(kept: Kept) -> None:
    """Log how many modules are FP8, and what is dequantized."""
    logger.info("%d linear layers and %d blocks of experts are FP8.", len(kept.linears), len(kept.experts))
    if kept.left:
        logger.warning(
            "%d FP8 weights are dequantized because of their layout or size, for example %r.",
            len(kept.left),
            kept.left[0],
        )


def _numbers(rows: LoadedRows) -> BlockNumbers:
    numbers, scale = rows.fields
    return BlockNumbers.of_rows(numbers, scale, rows.source.blocks[0])


def _fits(shape: Sequence[int], blocks: tuple[int, int]) -> bool:
    outputs, inputs = shape
    return blocks[1] in GROUPS and inputs % blocks[1] == 0 and outputs % ALIGNED == 0


def objection(target: StorageTarget) -> str | None:
    """Return why FP8 weights with a scale for each block cannot stay as they are, in words; None if they can."""
    platform = platform_of(target.device)
    if not platform.fp8_products:
        return "this device has no products of FP8 numbers"
    if not platform.shares_host_memory and not platform.has_triton:
        return "Triton is not installed"
    if not env.FP8():
        return "BEHELD_FP8=0"
    if target.exact or target.dtype != torch.bfloat16:
        return f"products of FP8 numbers are given in bfloat16, not {str(target.dtype).removeprefix('torch.')}"
    return None
