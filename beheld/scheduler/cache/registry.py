"""The kinds of cache groups: the only place of the scheduler that knows their names."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Ordered

from beheld.core.config import KVGroup
from beheld.scheduler.cache.chunked import ChunkedGroup
from beheld.scheduler.cache.conv import ConvGroup
from beheld.scheduler.cache.cross import CrossGroup
from beheld.scheduler.cache.full import FullGroup
from beheld.scheduler.cache.group import CacheGroup
from beheld.scheduler.cache.latent import LatentGroup
from beheld.scheduler.cache.recurrent import RecurrentGroup
from beheld.scheduler.cache.sliding import SlidingGroup

# KVGroup.kind -> what makes its part of the cache, of (spec, index, number of blocks, positions in a block).
KINDS: dict[str, Callable[[KVGroup, int, int, int], CacheGroup]] = {
    "full": FullGroup,
    "sliding": SlidingGroup,
    "chunked": ChunkedGroup,
    "conv": ConvGroup,
    "recurrent": RecurrentGroup,
    "latent": LatentGroup,
    "cross": CrossGroup,
}


def make_groups(specs: Ordered[KVGroup], num_blocks: Ordered[int], block_size: int) -> tuple[CacheGroup, ...]:
    """One CacheGroup for each of a model's layer groups; `num_blocks` of each include the null block."""
    assert len(specs) == len(num_blocks), "one number of blocks for each group"
    return tuple(
        KINDS[spec.kind](spec, index, count, block_size)
        for index, (spec, count) in enumerate(zip(specs, num_blocks, strict=True))
    )
