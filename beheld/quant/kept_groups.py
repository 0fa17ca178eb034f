"""Keeps a checkpoint's weights of few bits in memory as they are, for any method whose weights are grouped numbers.

Weights go through transformers' loader as rows of bytes (row_bytes.py), and layers multiply them (grouped_linear.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from beheld.parallel.shards import Cut
from beheld.platform.registry import platform_of
from beheld.quant import int4_gpu, int8_gpu, row_bytes
from beheld.quant.dequantize import LazyWeight
from beheld.quant.grouped import GROUP_UNIT, GroupedForm, GroupedNumbers, form_of
from beheld.quant.grouped_linear import GroupedLinear
from beheld.quant.int4_gpu import Int4GPULinear
from beheld.quant.int8_gpu import Int8GPULinear
from beheld.quant.linear import StoredExperts, StoredLinear
from beheld.quant.listed_experts import ListedExperts
from beheld.quant.method import Replace, StorageTarget
from beheld.quant.row_bytes import LoadedRows
from beheld.quant.stored_as import StoredAs
from beheld.utils import env
from beheld.utils.log import get_logger

logger = get_logger(__name__)

# Experts are dequantized on a GPU, and anywhere if each has its own order of inputs.
_EXPERTS = ".experts."


class LazyGrouped(LazyWeight):
    """A weight of few bits, read on use: as grouped numbers, or dequantized.

    Args:
        parts, compute, device, stored, shaped: see LazyWeight.
        numbers: makes grouped numbers of the parts, as `compute` makes the weight.
        bits: of a number as stored.
        groups: of inputs, as stored.
        ordered: whether inputs are in an order of their own (act-order), which is read with the numbers.
        by_output: whether numbers are of 8 bits, around 128, and an output's share one scale, as stored.
    """

    def __init__(
        self,
        parts: Mapping[str, Any],
        compute: Callable[..., Tensor],
        device: str,
        stored: StoredAs,
        numbers: Callable[..., GroupedNumbers],
        bits: int,
        groups: int,
        *,
        ordered: bool = False,
        by_output: bool = False,
        shaped: bool = False,
    ) -> None:
        super().__init__(parts, compute, device, stored, shaped=shaped)
        self.by_output = by_output
        self._numbers, self._bits, self._groups = numbers, bits, groups
        self.ordered = ordered
        self.order_K: Tensor | None = None
        self.outputs, inputs = stored.shape
        self.form = form_of(bits, inputs, groups)

    def fields(self) -> Sequence[Tensor]:
        """Return the fields of each output; see row_bytes.StoredWeight."""
        made = self._numbers(**{name: part[...] for name, part in self._parts.items()}, **self._known())
        assert made.form == self.form, "the form is that of the entries"
        assert self.ordered or made.order_K is None, "experts would lose the order"
        self.order_K = made.order_K
        return made.fields()

    def rank_part(self, cut: Cut) -> Self | None:
        """Return what a rank holds; see LazyWeight. Inputs in an order of their own belong to groups of all ranks."""
        made = None if self.ordered and cut.dim == 1 else super().rank_part(cut)
        if made is not None and cut.dim == 0:
            made.outputs = cut.size
        elif made is not None:
            made._groups = max(1, self._groups * cut.size // self.form.inputs)
            made.form = form_of(self._bits, cut.size, made._groups)
        return made


class KeptGroups:
    """See row_bytes.RowForm; also the parts of QuantMethod that differ if weights are kept.

    Args:
        rounds: whether the checkpoint wants activations rounded to int8 by row, which int8 products on a GPU require.

    Attributes:
        objection: why weights are not kept as stored, in words; None if they are kept.
    """

    def __init__(self, target: StorageTarget, *, rounds: bool = False) -> None:
        platform = platform_of(target.device)
        self._dtype = target.dtype
        self._on_gpu = not platform.shares_host_memory
        self._fours = platform.no_grouped_products is None
        self._eights = self._on_gpu and rounds and platform.no_int8_rows is None
        # Of interest for weights that are to be multiplied so.
        self._no_eights = platform.no_int8_rows if self._on_gpu and rounds else None
        self.objection = _objection(target, None if self._eights else platform.no_grouped_products)

    def loading(self, model_class: Any, weights: dict[str, Any]) -> Any:
        """Return a class with room for the rows of weights that are grouped numbers."""
        return row_bytes.keeping(model_class, weights, self)

    def settle(self, model: Any, model_class: Any, replace: Replace) -> None:
        """Separate rows into their fields and insert layers that multiply them."""
        kept = row_bytes.settle(model, model_class, self, replace)
        logger.info(
            "%d linear layers and %d blocks of experts keep the checkpoint's bits%s (BEHELD_KEEP_BITS=0 or "
            "dtype='float32' dequantizes weights instead).",
            len(kept.linears),
            len(kept.experts),
            self._rounds_words() if kept.linears else "",
        )
        if kept.left:
            logger.info(
                "%d quantized weights are dequantized because of their form or use%s, for example %r.",
                len(kept.left),
                f" (those of 8 bits: {self._no_eights})" if self._no_eights else "",
                kept.left[0],
            )

    def _rounds_words(self) -> str:
        if not self._on_gpu:
            return "; products round activations to 8 bits by row and group"
        return "; products of int8 weights round activations to int8 by row" if self._eights else ""

    def layout(self, weight: Any, inputs: int) -> Sequence[tuple[torch.dtype, int]]:
        """Return the fields of a row."""
        form: GroupedForm = weight.form
        return form.layout()

    def takes(self, parameter: Tensor, weights: Sequence[Any]) -> bool:
        """Return whether all weights have one form, of runs of inputs that products accept; experts in plain order."""
        if parameter.dim() > 2 and any(_ordered(weight) for weight in weights):
            # Rows of experts carry no order.
            return False
        forms = {getattr(weight, "form", None) for weight in weights}
        form = forms.pop()
        if form is None or forms or not is_kept(form) or form.inputs != parameter.shape[-1]:
            return False
        return not self._on_gpu or (
            parameter.dim() == 2
            and any(fits(weights[0], parameter.shape[0]) for fits in (self._is_four, self._is_eight))
        )

    def _is_four(self, weight: Any, outputs: int) -> bool:
        """Return whether a GPU multiplies groups of 4 bits by activations as they are."""
        return self._fours and int4_gpu.fits(weight.form, outputs)

    def _is_eight(self, weight: Any, outputs: int) -> bool:
        """Return whether a GPU multiplies int8 by rounded activations."""
        by_output = getattr(weight, "by_output", False)
        return self._eights and by_output and int8_gpu.fits(outputs, weight.form.inputs)

    def linear(self, rows: LoadedRows, bias_N: Tensor | None) -> StoredLinear:
        """Make a linear layer."""
        source = rows.source
        numbers = GroupedNumbers.of_fields(rows.fields, source.form, source.order_K)
        if not self._on_gpu:
            return GroupedLinear(numbers, bias_N, self._dtype)
        eight = self._is_eight(source, numbers.numbers_NK.shape[0])
        return (Int8GPULinear.of_numbers if eight else Int4GPULinear)(numbers, bias_N, self._dtype)

    def experts(self, shell: nn.Module, gate_up: LoadedRows, down: LoadedRows) -> StoredExperts:
        """Make experts, each of two layers."""
        both = []
        for rows in (gate_up, down):
            each = (GroupedNumbers.of_fields(own, rows.source.form, None) for own in zip(*rows.fields, strict=True))
            both.append([GroupedLinear(numbers, None, self._dtype) for numbers in each])
        return ListedExperts(shell, both[0], both[1])

    def stored_bytes(self, weights: Mapping[str, Any], model: Any) -> int:
        """Return the bytes of a model on the meta device whose grouped weights are kept, of weights by name."""
        total = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        for name, weight in weights.items():
            form = getattr(weight, "form", None)
            if form is None or not is_kept(form):
                continue
            if _EXPERTS in name and (self._on_gpu or _ordered(weight)):
                continue
            outputs = weight.outputs
            if self._on_gpu and self._is_eight(weight, outputs):
                total += int8_gpu.kept_bytes(outputs, form.inputs) - outputs * form.inputs * self._dtype.itemsize
            elif not self._on_gpu or self._is_four(weight, outputs):
                total += form.kept_bytes(outputs) - outputs * form.inputs * self._dtype.itemsize
        return int(total)


def _ordered(weight: Any) -> bool:
    return getattr(weight, "ordered", False)


def is_kept(form: GroupedForm) -> bool:
    """Return whether products accept weights of this form."""
    size, rest = divmod(form.inputs, form.groups)
    return rest == 0 and size % GROUP_UNIT == 0


def _objection(target: StorageTarget, missing: str | None) -> str | None:
    """Return why nothing is kept; `missing`: why no product multiplies it."""
    platform = platform_of(target.device)
    if missing is not None:
        return missing
    if not env.KEEP_BITS():
        return "BEHELD_KEEP_BITS=0"
    if target.exact:
        return f"the dtype is {str(target.dtype).removeprefix('torch.')}"
    if not platform.shares_host_memory and target.dtype not in (torch.bfloat16, torch.float16):
        return "products on a GPU are of bfloat16 or float16"
    return None
