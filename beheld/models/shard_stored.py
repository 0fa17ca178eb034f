"""Cuts a loaded model whose weights are stored quantized: layers by their own parts, experts whole.

Every rank keeps whole what the quantization method cannot cut, because of its units or padding.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from beheld.models.shard_weights import cut
from beheld.parallel.shard_plan import Shard, ShardPlan
from beheld.parallel.shards import Cut, Zeros
from beheld.quant.linear import StoredExperts, StoredLinear
from beheld.utils.log import get_logger

logger = get_logger(__name__)


def shard_stored(model: Any, plan: ShardPlan) -> ShardPlan:
    """Cut a model; returns the plan without what stays whole.

    Args:
        plan: of the same model without quantization.
    """
    refused = {shard.path for shard in plan.shards if not _can_cut(model, shard)}
    if refused:
        logger.info("%d modules are whole on every rank: their stored weights cannot be cut there.", len(refused))
        plan = plan.without(refused)
    shapes: dict[str, tuple[int, ...]] = {}
    for shard in plan.shards:
        for path in _stored(model, shard):
            old: Any = model.get_submodule(path)
            shapes[f"{path}.weight"] = (old.out_features, old.in_features)
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, _part(old, shard.cuts[f"{path}.weight"], plan.rank))
    return cut(model, dataclasses.replace(plan, shapes=shapes))


def _stored(model: Any, shard: Shard) -> list[str]:
    """Return the paths of a shard's stored linear layers."""
    paths = dict.fromkeys(name.rpartition(".")[0] for name in shard.cuts)
    return [path for path in paths if isinstance(model.get_submodule(path), StoredLinear)]


def _can_cut(model: Any, shard: Shard) -> bool:
    if any(isinstance(model.get_submodule(name.rpartition(".")[0]), StoredExperts) for name in shard.cuts):
        return False
    stored = _stored(model, shard)
    for path in stored:
        layer: Any = model.get_submodule(path)
        part = shard.cuts[f"{path}.weight"]
        unit = layer.units.outputs if part.dim == 0 else layer.units.inputs
        for piece in part.pieces:
            if isinstance(piece, Zeros) or piece.start % unit or piece.stop % unit:
                return False
        if not part.pieces or (part.dim == 1 and len(part.pieces) > 1):
            return False
    return True


def _part(layer: Any, part: Cut, rank: int) -> nn.Module:
    slices = [slice(piece.start, piece.stop) for piece in part.pieces if isinstance(piece, range)]
    if part.dim == 0:
        parts = [layer.part(each) for each in slices]
        return parts[0] if len(parts) == 1 else type(layer).joined(parts)
    made = layer.input_part(slices[0])
    if rank == 0 and layer.bias is not None:
        # One rank adds the bias.
        made.bias = nn.Parameter(layer.bias.data, requires_grad=False)
    return made
