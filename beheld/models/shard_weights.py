"""Loads one rank's part of a model: smaller modules, and of each weight in the files only what belongs into them."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from beheld.checkpoint.loader_rules import LoaderRules
from beheld.core.config import ModelInfo
from beheld.models.find_shards import find
from beheld.parallel.shard_plan import Shard, ShardPlan
from beheld.parallel.shards import Cut, Piece, RankSlice
from beheld.utils.named_as import named_as

# See QuantMethod.kept_as.
KeptAs = Callable[[Tensor, Sequence[Any]], str | None]

# Of one expert's weight, which expert it is: the last number in its name.
_NUMBER = re.compile(r"\.(\d+)\.(?!.*\.\d+\.)")


def sharded(
    model_class: Any,
    info: ModelInfo,
    rank: int,
    ranks: int,
    weights: dict[str, Any] | None,
    *,
    kept_as: KeptAs | None = None,
    whole_experts: bool = False,
    towers: bool = False,
) -> Any:
    """Return a subclass of `model_class` whose models hold one rank's part; `shard_plan` says which.

    Args:
        weights: name -> weight of the checkpoint, unread; a model replaces those of which it takes a part. None: the
            model is not loaded from files.
        kept_as: how the quantization method stores weights; None if all are plain.
    """

    class Sharded(model_class):
        def __init__(self, config: Any, *args: Any, **keywords: Any) -> None:
            super().__init__(config, *args, **keywords)
            shared_out = {"whole_experts": whole_experts, "towers": towers}
            self.shard_plan = shard(self, info, rank, ranks, weights, kept_as=kept_as, **shared_out)

    return named_as(Sharded, model_class)


def shard(
    model: Any,
    info: ModelInfo,
    rank: int,
    ranks: int,
    weights: dict[str, Any] | None,
    *,
    kept_as: KeptAs | None = None,
    whole_experts: bool = False,
    towers: bool = False,
) -> ShardPlan:
    """Cut the weights of a model, which may be on the meta device, and replace those in `weights` likewise.

    Modules then know their own sizes, so that all that is done to them later finds them consistent.
    """
    find_of = functools.partial(find, model, info, ranks=ranks, whole_experts=whole_experts, towers=towers)
    plan = find_of(rank)
    # The last ranks first: they hold zeros, if any does, and one that refuses is enough.
    others = [functools.cache(functools.partial(find_of, each)) for each in reversed(range(ranks)) if each != rank]
    plan = _apply(plan, others, model, {} if weights is None else weights, kept_as or _plain)
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
        if not isinstance(whole, nn.Parameter):
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


def _plain(parameter: Tensor, weights: Sequence[Any]) -> None:
    return None


def _apply(
    plan: ShardPlan,
    others: Sequence[Callable[[], ShardPlan]],
    model: Any,
    weights: dict[str, Any],
    kept_as: KeptAs,
) -> ShardPlan:
    """Replace the weights that are cut.

    Args:
        others: give the other ranks' plans, of as many shards. Ranks leave the same modules whole, although only some
            of them may hold zeros, or a part of a group.

    Returns:
        The plan without what the loader converts in a way unknown here, and without weights of few
        bits that would be stored otherwise if they were cut.
    """
    rules, known = LoaderRules(model), model.state_dict()
    sources: dict[str, list[tuple[str, Any]]] = defaultdict(list)
    for name in weights:
        target, rule = rules.target(name, known)
        sources[target].append((name, rule))
        for other in _further_targets(rule, target, known):
            sources[other].append((name, rule))
    replaced: dict[str, Any] = {}
    refused: dict[str, str] = {}
    for number, shard in enumerate(plan.shards):
        made = _cuts_of(shard, known, sources)
        if made is None:
            refused[shard.path] = "whose weights are converted as they are loaded"
            continue
        parts = {name: None if own is None else _part(weights[name], own) for name, own in made.items()}
        of_others = functools.partial(_of_others, number, others, known, sources)
        if _stored_alike(model, shard, made, of_others, sources, weights, parts, kept_as):
            replaced |= parts
        else:
            refused[shard.path] = "whose weights have few bits, in groups that ranks cannot share"
    _with_partners(refused, plan, sources)
    if refused:
        left = plan.without(set(refused))
        count = len(plan.shards) - len(left.shards)
        words = f"{count} modules {' or '.join(sorted(set(refused.values())))}"
        left = dataclasses.replace(left, whole=(*left.whole, words))
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
            weights[name] = part
    return plan


def _with_partners(refused: dict[str, str], plan: ShardPlan, sources: Mapping[str, Sequence[tuple[str, Any]]]) -> None:
    """Refuse experts also if others are refused whose weights come in one list with theirs.

    The loader cuts the list into equal parts, so all have as many experts.
    """
    names = {
        shard.path: {name for target in shard.cuts for name, _ in sources.get(target, ())}
        for shard in plan.shards
        if shard.experts is not None
    }
    for path in names.keys() & set(refused):
        for other in names.keys() - set(refused):
            if names[path] & names[other]:
                refused[other] = refused[path]


def _part(weight: Any, cut: Cut) -> Any:
    """Return a part of a weight, unread: by its own entries, or of the whole where they cannot be cut."""
    own = weight.rank_part(cut) if hasattr(weight, "rank_part") else None
    return RankSlice(weight, cut) if own is None else own


def _of_others(
    number: int,
    others: Sequence[Callable[[], ShardPlan]],
    known: Mapping[str, Tensor],
    sources: Mapping[str, Any],
) -> Iterator[tuple[Shard, dict[str, Cut | None]]]:
    """Yield the shard of this number on the other ranks, with the cuts of the checkpoint's weights."""
    for plan_of in others:
        shard = plan_of().shards[number]
        yield shard, _cuts_of(shard, known, sources) or {}


def _stored_alike(
    model: Any,
    shard: Shard,
    cuts: Mapping[str, Cut | None],
    of_others: Callable[[], Iterable[tuple[Shard, dict[str, Cut | None]]]],
    sources: Mapping[str, Any],
    weights: Mapping[str, Any],
    parts: Mapping[str, Any],
    kept_as: KeptAs,
) -> bool:
    """Return whether the quantization method stores every rank's parts as it would store the whole weights."""
    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    for target in shard.cuts:
        path, _, own = target.rpartition(".")
        module: Any = model.get_submodule(path)
        whole = getattr(module, own)
        # Only linear layers and experts are kept.
        if (
            shard.tower
            or whole.dim() < 2
            or target in tied
            or target in tied.values()
            or isinstance(module, nn.Embedding)
        ):
            continue
        names = [name for name, _ in sources.get(target, ()) if name in cuts]
        stored = kept_as(whole, [weights[name] for name in names])
        if stored is None:
            continue
        own_parts = [parts[name] for name in names if parts[name] is not None]
        if kept_as(_of_size(whole, shard.cuts[target]), own_parts) != stored:
            return False
        for other, there in of_others():
            # One of them tells: all that are kept in a parameter have one form.
            found = ((name, there.get(name)) for name in names)
            part = next(([_part(weights[name], cut)] for name, cut in found if cut is not None), [])
            if kept_as(_of_size(whole, other.cuts[target]), part) != stored:
                return False
    return True


def _of_size(whole: Tensor, cut: Cut) -> Tensor:
    """Return a tensor of a part's shape and type, without numbers."""
    shape = [*whole.shape[: cut.dim], cut.size, *whole.shape[cut.dim + 1 :]]
    return torch.empty(shape, dtype=whole.dtype, device="meta")


def _further_targets(rule: Any, target: str, known: Mapping[str, Any]) -> list[str]:
    """Return the parameters that a conversion to several of them may make besides the one that is named.

    None where this rank does not load the module: other modules' parameters may have the same ends.
    """
    if rule is None or len(rule.target_patterns) < 2 or target not in known:
        return []
    first, *ends = _ends(rule)
    there = [target.replace(first, end) for end in ends] if first in target else []
    if there and all(name in known for name in there):
        return there
    return [name for name in known if name != target and any(end in name for end in (first, *ends))]


def _ends(rule: Any) -> list[str]:
    """Return what the names of a conversion's parameters have in them."""
    return [str(pattern).replace("\\", "").strip("^$") for pattern in rule.target_patterns]


def _cuts_of(shard: Shard, known: Mapping[str, Tensor], sources: Mapping[str, Any]) -> dict[str, Cut | None] | None:
    """Return the cuts of the checkpoint's weights of a shard, None for those of other ranks alone.

    Returns:
        None if one is made in an unknown way.
    """
    found: dict[str, Cut | None] = {}
    for target, cut in shard.cuts.items():
        for name, rule in sources.get(target, ()):
            steps = None if rule is None else _steps(rule)
            number = _NUMBER.search(name)
            first = 0
            if steps is not None and steps.shares_out:
                # Each parameter has as many experts of the list.
                size = len(known[target])
                first = size * next((place for place, end in enumerate(_ends(rule)) if end in target), 0)
                if number is None:
                    return None
                if not first <= int(number[1]) < first + size:
                    continue
            if shard.experts is not None and steps is not None and steps.stacks_experts:
                if number is None:
                    return None
                if int(number[1]) - first not in shard.experts:
                    found[name] = None
                continue
            own = cut if rule is None else _before(rule, cut, known[target], shard.num_sections.get(target, 1))
            if own is None:
                return None
            found[name] = own
    return found


@dataclasses.dataclass(frozen=True)
class _LoaderSteps:
    """What a conversion does.

    Attributes:
        stacked, joined: the dimensions in which it stacks modules of a list, and joins the stacks of several lists.
        shares_out: it shares out the list among several parameters, in order and equally.
    """

    stacked: int | None
    joined: int | None
    shares_out: bool = False

    @property
    def stacks_experts(self) -> bool:
        """Whether it stacks the weights of single experts, and perhaps joins the stacks."""
        return self.stacked == 0 and self.joined != 0


def _steps(rule: Any) -> _LoaderSteps | None:
    """Return what a conversion does; None if it does anything else."""
    steps = {type(step).__name__: step for step in rule.operations}
    if len(steps) != len(rule.operations):
        return None
    if len(rule.target_patterns) == 1 and set(steps) <= {"MergeModulelist", "Concatenate"}:
        stacked, joined = (steps[name].dim if name in steps else None for name in ("MergeModulelist", "Concatenate"))
        return _LoaderSteps(stacked, joined)
    step: Any = rule.operations[0] if len(steps) == 1 else None
    kind: Any = type(step)
    sources = len(rule.source_patterns)
    if not hasattr(step, "stack_dim") or not hasattr(step, "concat_dim"):
        return None
    if not _shares_out(kind, step.stack_dim, step.concat_dim, sources, len(rule.target_patterns)):
        return None
    return _LoaderSteps(step.stack_dim, step.concat_dim if sources > 1 else None, shares_out=True)


@functools.cache
def _shares_out(kind: Any, stacked: int, joined: int, num_sources: int, num_targets: int) -> bool:
    """Return whether an operation gives its first target the first modules of each list, stacked and joined, and so on.

    It is tried with numbers, because nothing else says so.
    """
    lists = {
        f"source {source}": [
            torch.full((2, 2), 100 * source + number, device="cpu") for number in range(2 * num_targets)
        ]
        for source in range(num_sources)
    }
    targets = [f"target {number}" for number in range(num_targets)]

    def wanted(number: int) -> Tensor:
        own = slice(2 * number, 2 * number + 2)
        return torch.cat([torch.stack(each[own], stacked) for each in lists.values()], joined)

    try:
        made = kind(stacked, joined).convert(lists, list(lists), targets, None)
        return all(torch.equal(made[target], wanted(number)) for number, target in enumerate(targets))
    except Exception:
        # It may ask for anything.
        return False


def _before(rule: Any, cut: Cut, target: Tensor, num_sections: int) -> Cut | None:
    """Return the cut of what a conversion stacks and joins into `target`; None if it does something else."""
    dim, pieces = cut.dim, cut.pieces
    only: Any = rule.operations[0] if len(rule.operations) == 1 else None
    if type(only).__name__ == "Transpose" and dim not in (only.dim0, only.dim1):
        return cut
    steps = _steps(rule)
    if steps is None:
        return None
    if steps.joined is not None:
        if steps.joined != dim or len(rule.source_patterns) != num_sections:
            return None
        pieces = _first(pieces, target.shape[dim] // num_sections)
    if steps.stacked is not None:
        if steps.stacked != 0 or dim == 0:
            return None
        dim -= 1
    return dataclasses.replace(cut, dim=dim, pieces=pieces)


def _first(pieces: tuple[Piece, ...], size: int) -> tuple[Piece, ...]:
    """Return the pieces of the first section, of `size` entries: sections are cut alike."""
    count = sum(isinstance(piece, range) and piece.start < size for piece in pieces)
    ranges = sum(isinstance(piece, range) for piece in pieces)
    each = len(pieces) * count // ranges if ranges else len(pieces) // 2
    return pieces[:each]
