"""Makes a model of which each rank holds a part compute as one: sizes of its modules, and sums over the ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from beheld.models.surgery.linears import forward_text
from beheld.models.surgery.operation import Changes, Target
from beheld.parallel.group import RankGroup, joined_over_ranks, sum_over_ranks_

_HEADS_IN_CONFIG = re.compile(r"config\.num_(attention|key_value)_heads")


class OverRanks(nn.Module):
    """A module of which each rank has a part."""

    def __init__(self, inner: nn.Module, group: RankGroup) -> None:
        super().__init__()
        self.inner = inner
        self.__dict__["group"] = group

    @property
    def weight(self) -> Any:
        """Return the inner module's weight, for models that ask for its type."""
        return self.inner.weight

    @property
    def bias(self) -> Any:
        """Return the inner module's bias."""
        return self.inner.bias


class SummedOverRanks(OverRanks):
    """A module of which each rank computes a part of every output."""

    def forward(self, *args: Any, **keywords: Any) -> Tensor:
        """Return the sum of all ranks' outputs."""
        return sum_over_ranks_(self.inner(*args, **keywords), self.__dict__["group"])


class SomeExperts(OverRanks):
    """Experts of which each rank has some; the others' outputs are added."""

    def __init__(self, inner: nn.Module, group: RankGroup, own: range) -> None:
        super().__init__(inner, group)
        self.own = own

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor, *args: Any, **keywords: Any) -> Tensor:
        """Return the sum over all ranks. Numbers beyond this rank's experts mean none."""
        here = (chosen >= self.own.start) & (chosen < self.own.stop)
        chosen = torch.where(here, chosen - self.own.start, len(self.own))
        return sum_over_ranks_(self.inner(hidden, chosen, weights * here, *args, **keywords), self.__dict__["group"])


class JoinedOverRanks(OverRanks):
    """A head of which each rank computes some of the logits.

    Args:
        size: the vocabulary's; what follows is padding.
    """

    def __init__(self, inner: nn.Module, group: RankGroup, size: int) -> None:
        super().__init__(inner, group)
        self.size = size

    def forward(self, hidden: Tensor) -> Tensor:
        """Return all logits, on every rank."""
        return joined_over_ranks(self.inner(hidden), self.__dict__["group"])[..., : self.size]


class OwnConfig:
    """A configuration as an attention module with a part of the heads sees it."""

    def __init__(self, config: Any, **own: int) -> None:
        self.__dict__.update(own)
        self.__dict__["_whole"] = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_whole"], name)


def resize(target: Target, changes: Changes) -> None:
    """Show attention its own heads where it reads their number, and look up embeddings on the rank that has them."""
    plan, group = target.shards, target.ranks
    assert plan is not None
    assert group is not None
    for shard in plan.shards:
        if shard.path == "vocabulary":
            continue
        module = target.model.get_submodule(shard.path)
        kind: Any = type(module)
        if shard.heads is not None and _HEADS_IN_CONFIG.search(forward_text(kind)):
            own = {
                "num_attention_heads": len(shard.heads.queries),
                "num_key_value_heads": len(shard.heads.keys),
            }
            changes.set(module, "config", OwnConfig(module.config, **own))
    if plan.embedding is not None:
        path, first = plan.embedding
        # A family may have put it into a module of its own.
        inside = target.model.get_submodule(path).modules()
        embedding = next(module for module in inside if isinstance(module, nn.Embedding))
        rows = plan.cuts[f"{path}.weight"].size
        # The padding's number may be beyond this rank's rows; it only matters in training.
        changes.set(embedding, "padding_idx", None)
        changes.set(embedding, "forward", _looking_up(embedding.forward, first, rows, group))


def _looking_up(
    forward: Callable[[Tensor], Tensor], first: int, rows: int, group: RankGroup
) -> Callable[[Tensor], Tensor]:

    def looking_up(input: Tensor) -> Tensor:
        own = input - first
        inside = (own >= 0) & (own < rows)
        found = forward(torch.where(inside, own, 0))
        return sum_over_ranks_(found * inside.unsqueeze(-1), group)

    return looking_up


def sum_up(target: Target, changes: Changes) -> None:
    """Add the sums over ranks, to modules in their final form."""
    plan, group, model = target.shards, target.ranks, target.model
    assert plan is not None
    assert group is not None
    for shard in plan.shards:
        if shard.summed is None:
            continue
        path, _, name = shard.summed.rpartition(".")
        parent = model.get_submodule(path)
        inner = getattr(parent, name)
        made = SummedOverRanks(inner, group) if shard.experts is None else SomeExperts(inner, group, shard.experts)
        changes.replace(parent, name, made, lambda module: module.inner)  # type: ignore[arg-type, return-value]
    if plan.head is not None:
        model.set_output_embeddings(JoinedOverRanks(model.get_output_embeddings(), group, plan.vocab_size))
        changes.undo_with(lambda: model.set_output_embeddings(model.get_output_embeddings().inner))
