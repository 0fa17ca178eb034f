"""Chooses the form of linear layers on a CPU, and moves their weights to memory that is read faster."""

from __future__ import annotations

from torch import nn

from beheld.models.surgery.linears import PackedLinear, SmallBatchLinear, can_pack, replace_linears
from beheld.models.surgery.operation import Changes, Target
from beheld.models.surgery.vector_linear import VectorLinear, can_multiply
from beheld.quant.grouped_linear import GroupedLinear
from beheld.utils import allocator
from beheld.utils.log import get_logger

logger = get_logger(__name__)


def pack_linears(target: Target, changes: Changes) -> None:
    """Replace linear layers by the form that this CPU multiplies fastest."""
    packed = PackedLinear if can_pack() else SmallBatchLinear
    compiles = can_multiply()

    def kind(linear: nn.Linear) -> nn.Module:
        return VectorLinear(linear) if compiles and VectorLinear.fits(linear) else packed(linear)

    # A head that shares the embeddings' weights keeps a separate packed copy from now on.
    changes.undo_with(target.model.tie_weights)
    found = replace_linears(target.model, kind, target.dtype, changes)
    allocator.give_back_freed()
    logger.debug("Replaced %d linear layers by %s.", found, "VectorLinear" if compiles else packed.__name__)


def use_pages(target: Target, changes: Changes) -> None:
    """Move the weights of few bits that are not in huge pages yet."""
    for module in target.model.modules():
        if isinstance(module, GroupedLinear):
            module.use_pages()
    allocator.give_back_freed()
