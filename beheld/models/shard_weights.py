"""Loads one rank's part of a model: smaller modules, and of each weight in the files only what belongs into them."""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from beheld.checkpoint.loader_rules import LoaderRules
from beheld.core.config import ModelInfo
from beheld.models.find_shards import find
from beheld.parallel.shard_plan import Shard, ShardPlan
from beheld.parallel.shards import Cut, Piece
from beheld.quant.linear import StoredExperts, StoredLinear
from beheld.utils.named_as import named_as

# Of one expert's weight, which expert it is: the last number in its name.
_NUMBER = re.compile(r"\.(\d+)\.(?!.*\.\d+\.)")


class RankSlice:
    """A weight of the checkpoint of which a rank reads its part, for transformers' loader in place of a slice.

    Args:
        weight: the whole weight, unread.
        cut: the part.
    """

    def __init__(self, weight: Any, cut: Cut) -> None:
        self._weight, self._cut = weight, cut

    def __getitem__(self, index: Any) -> Tensor:
        """Return the part `index` of the part; `...` is all of it."""
        weight = self._weight
        # Only slices of files read a part; other weights are made as a whole, in another type or of other numbers.
        shape = weight.get_shape() if hasattr(weight, "get_shape") else None
        if shape is None:
            weight = weight[...]
            shape = weight.shape
        return self._cut.of(weight, shape)[index]


def sharded(
    model_class: Any,
    info: ModelInfo,
    rank: int,
    ranks: int,
    weights: dict[str, Any] | None,
    *,
    whole_experts: bool = False,
    towers: bool = False,
) -> Any:
    """Return a subclass of `model_class` whose models hold one rank's part; `shard_plan` says which.

    Args:
        weights: name -> weight of the checkpoint, unread; a model replaces those of which it takes a part. None: the
            model is not loaded from files.
    """

    class Sharded(model_class):
        def __init__(self, config: Any, *args: Any, **keywords: Any) -> None:
            super().__init__(config, *args, **keywords)
            self.shard_plan = shard(self, info, rank, ranks, weights, whole_experts=whole_experts, towers=towers)

    return named_as(Sharded, model_class)


def shard(
    model: Any,
    info: ModelInfo,
    rank: int,
    ranks: int,
    weights: dict[str, Any] | None,
    *,
    whole_experts: bool = False,
    towers: bool = False,
) -> ShardPlan:
    """Cut the weights of a model, which may be on the meta device, and replace those in `weights` likewise.

    Modules then know their own sizes, so that all that is done to them later finds them consistent.
    """
    plan = find(model, info, rank, ranks, whole_experts=whole_experts, towers=towers)
    if weights is not None:
        plan = _apply(plan, model, weights)
    return cut(model, plan)


def cut(model: Any, plan: ShardPlan) -> ShardPlan:
    """Cut a model's weights, and set the sizes that its modules know; returns the plan with the whole weights' shapes.

    Weights that are no parameters of the model are left as they are.
    """
    done: dict[int, tuple[int, ...]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, part in plan.cuts.items():
        path, _, own = name.rpartition(".")
        module: Any = model.get_submodule(path)
        whole = getattr(module, own)
        if not isinstance(whole, nn.Parameter) or isinstance(module, StoredLinear | StoredExperts):
            continue
        shapes[name] = done.get(id(whole), tuple(whole.shape))
        # The same object, so that the whole weight's memory is free before the next one is cut: a device that holds the
        # model once need not hold it and its part. A tied weight, which two modules have, is cut once.
        if id(whole) not in done:
            done[id(whole)] = shapes[name]
            whole.requires_grad_(False)
            whole.data = part.of(whole.data, whole.shape).clone()
        if own == "weight":
            _resize(module)
    for each in plan.shards:
        for name, size in each.sizes.items():
            setattr(model.get_submodule(each.path), name, size)
    return dataclasses.replace(plan, shapes=dict(plan.shapes) | shapes)


def _resize(module: Any) -> None:
    sizes = module.weight.shape
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = sizes
    elif isinstance(module, nn.Embedding):
        module.num_embeddings = sizes[0]
    elif isinstance(module, nn.Conv1d):
        # One that mixes no channels.
        module.in_channels = module.out_channels = module.groups = sizes[0]


def _apply(plan: ShardPlan, model: Any, weights: dict[str, Any]) -> ShardPlan:
    """Replace the weights that are cut; returns the plan without what the loader converts in a way unknown here."""
    rules, known = LoaderRules(model), model.state_dict()
    sources: dict[str, list[tuple[str, Any]]] = defaultdict(list)
    for name in weights:
        target, rule = rules.target(name, known)
        sources[target].append((name, rule))
        for other in _further_targets(rule, target, known):
            sources[other].append((name, rule))
    replaced: dict[str, Cut | None] = {}
    refused: set[str] = set()
    for shard in plan.shards:
        made = _cuts_of(shard, known, sources)
        if made is None:
            refused.add(shard.path)
        else:
            replaced |= made
    if refused:
        left = plan.without(refused)
        converted = f"{len(plan.shards) - len(left.shards)} modules whose weights are converted as they are loaded"
        left = dataclasses.replace(left, whole=(*left.whole, converted))
        kept = {shard.path for shard in left.shards}
        for shard in plan.shards:
            if shard.path not in kept:
                for name in _cuts_of(shard, known, sources) or ():
                    replaced.pop(name, None)
        plan = left
    for name, part in replaced.items():
        if part is None:
            del weights[name]
        else:
            weights[name] = RankSlice(weights[name], part)
    return plan


def _further_targets(rule: Any, target: str, known: Mapping[str, Any]) -> list[str]:
    """Return the parameters that a conversion to several of them may make besides the one that is named."""
    if rule is None or len(rule.target_patterns) < 2:
        return []
    ends = [str(pattern).replace("\\", "").strip("^$") for pattern in rule.target_patterns]
    return [name for name in known if name != target and any(end in name for end in ends)]


def _cuts_of(shard: Shard, known: Mapping[str, Tensor], sources: Mapping[str, Any]) -> dict[str, Cut | None] | None:
    """Return the cuts of the checkpoint's weights of a shard, None for those of other ranks alone.

    Returns:
        None if one is made in an unknown way.
    """
    found: dict[str, Cut | None] = {}
    for target, cut in shard.cuts.items():
        for name, rule in sources.get(target, ()):
            if shard.experts is not None and rule is not None and _stacks(rule):
                number = _NUMBER.search(name)
                if number is None:
                    return None
                if int(number[1]) not in shard.experts:
                    found[name] = None
                continue
            own = cut if rule is None else _before(rule, cut, known[target], shard.num_sections.get(target, 1))
            if own is None:
                return None
            found[name] = own
    return found


def _stacks(rule: Any) -> bool:
    """Return whether a conversion stacks the weights of single experts, and perhaps joins the stacks."""
    steps = {type(step).__name__: step for step in rule.operations}
    joins = set(steps) == {"MergeModulelist", "Concatenate"} and steps["Concatenate"].dim != 0
    return (joins or set(steps) == {"MergeModulelist"}) and steps["MergeModulelist"].dim == 0


def _before(rule: Any, cut: Cut, target: Tensor, num_sections: int) -> Cut | None:
    """Return the cut of what a conversion stacks and joins into `target`; None if it does something else."""
    dim, pieces = cut.dim, cut.pieces
    steps = {type(step).__name__: step for step in rule.operations}
    if set(steps) == {"Transpose"} and dim not in (steps["Transpose"].dim0, steps["Transpose"].dim1):
        return cut
    if len(steps) != len(rule.operations) or set(steps) - {"MergeModulelist", "Concatenate"}:
        return None
    if len(rule.target_patterns) != 1:
        return None
    if "Concatenate" in steps:
        if steps["Concatenate"].dim != dim or len(rule.source_patterns) != num_sections:
            return None
        pieces = _first(pieces, target.shape[dim] // num_sections)
    if "MergeModulelist" in steps:
        if steps["MergeModulelist"].dim != 0 or dim == 0:
            return None
        dim -= 1
    return dataclasses.replace(cut, dim=dim, pieces=pieces)


def _first(pieces: tuple[Piece, ...], size: int) -> tuple[Piece, ...]:
    """Return the pieces of the first section, of `size` entries: sections are cut alike."""
    count = sum(isinstance(piece, range) and piece.start < size for piece in pieces)
    ranges = sum(isinstance(piece, range) for piece in pieces)
    each = len(pieces) * count // ranges if ranges else len(pieces) // 2
    return pieces[:each]
