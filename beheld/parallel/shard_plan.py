"""What one rank holds of a model: the cuts of its weights, and where outputs are summed over the ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from beheld.core.config import KVGroup, ModelInfo
from beheld.parallel.shards import Cut, Heads


@dataclass(frozen=True)
class Shard:
    """Weights that are shared out together, or not at all.

    Attributes:
        path: of the module.
        cuts: parameter, by its full name -> this rank's part.
        summed: path of the module whose outputs are to be summed over the ranks; None if it is the vocabulary.
        heads: of attention, this rank's.
        num_sections: parameter -> how many layers of one input are joined in it, each cut alike; 1 if not named.
        sizes: attribute of the module -> its value with this rank's part.
        experts: which experts are this rank's; None if it has a part of each, or there are none.
        tower: whether it is of a tower.
        cache: the index of the layer's cache group, and the group as this rank holds it; None if it keeps nothing.
    """

    path: str
    cuts: Mapping[str, Cut]
    summed: str | None = None
    heads: Heads | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    num_sections: Mapping[str, int] = field(default_factory=dict)
    cache: tuple[int, KVGroup] | None = None
    experts: range | None = None
    tower: bool = False


@dataclass(frozen=True)
class ShardPlan:
    """What one rank holds of a model.

    Attributes:
        embedding: path of the embedding whose rows are shared out, with the first row of this rank; None if all ranks
            have it whole. `head` likewise.
        vocab_size: rows of the whole embedding.
        whole: what is not shared out, in words.
        shapes: parameter -> its whole shape, of those that are cut.
        caches: index of a cache group -> this rank's form, of those whose layers `keeping` left out.
    """

    rank: int
    ranks: int
    shards: tuple[Shard, ...]
    embedding: tuple[str, int] | None = None
    head: str | None = None
    vocab_size: int = 0
    whole: tuple[str, ...] = ()
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    caches: Mapping[int, KVGroup] = field(default_factory=dict)

    @property
    def cuts(self) -> dict[str, Cut]:
        """All cuts, by the parameter's full name."""
        return {name: cut for shard in self.shards for name, cut in shard.cuts.items()}

    @property
    def cuts_towers(self) -> bool:
        """Whether ranks wait for each other while they encode media."""
        return any(shard.tower for shard in self.shards)

    def without(self, paths: set[str]) -> ShardPlan:
        """Return the plan with these blocks, and all others of their cache groups, whole: a group has one shape."""
        dropped = [shard for shard in self.shards if shard.path in paths]
        groups = {shard.cache[0] for shard in dropped if shard.cache is not None}
        paths = paths | {shard.path for shard in self.shards if shard.cache is not None and shard.cache[0] in groups}
        kept = tuple(shard for shard in self.shards if shard.path not in paths)
        if any(shard.path == "vocabulary" for shard in dropped):
            return dataclasses.replace(self, shards=kept, embedding=None, head=None)
        return dataclasses.replace(self, shards=kept)

    def keeping(self, exists: Callable[[str], bool]) -> ShardPlan:
        """Return the plan with those modules alone that exist; the cache groups keep this rank's form."""
        kept = tuple(shard for shard in self.shards if shard.path == "vocabulary" or exists(shard.path))
        return dataclasses.replace(self, shards=kept, caches=self._caches)

    @property
    def _caches(self) -> dict[int, KVGroup]:
        return dict(self.caches) | {shard.cache[0]: shard.cache[1] for shard in self.shards if shard.cache is not None}

    def local(self, info: ModelInfo) -> ModelInfo:
        """Return the model's facts as this rank sees them: with its own part of each cache group."""
        own = self._caches
        groups = tuple(own.get(index, group) for index, group in enumerate(info.kv_groups))
        return dataclasses.replace(info, kv_groups=groups)
