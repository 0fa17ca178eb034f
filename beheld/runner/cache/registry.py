"""The kinds of cache groups: the only place of the runner that knows their names."""

from __future__ import annotations

from collections.abc import Callable

from beheld.core.config import KVGroup, ModelInfo
from beheld.runner.cache.cache import DeviceCaches, StateCache, TableCache
from beheld.runner.cache.chunked import ChunkedCache
from beheld.runner.cache.conv import ConvCache
from beheld.runner.cache.cross import CrossCache
from beheld.runner.cache.full import FullCache
from beheld.runner.cache.latent import LatentCache
from beheld.runner.cache.recurrent import RecurrentCache
from beheld.runner.cache.sliding import SlidingCache

# KVGroup.kind -> what makes its part, of (spec, index).
TABLES: dict[str, Callable[[KVGroup, int], TableCache]] = {
    "full": FullCache,
    "sliding": SlidingCache,
    "chunked": ChunkedCache,
    "conv": ConvCache,
    "recurrent": RecurrentCache,
    "latent": LatentCache,
}
STATES: dict[str, Callable[[KVGroup, int], StateCache]] = {"cross": CrossCache}


def make_caches(info: ModelInfo) -> DeviceCaches:
    """The parts of all layer groups of a model."""
    specs = list(enumerate(info.kv_groups))
    tables = tuple(TABLES[spec.kind](spec, index) for index, spec in specs if spec.kind not in STATES)
    states = [STATES[spec.kind](spec, index) for index, spec in specs[len(tables) :]]
    assert len(states) <= 1, "groups without block tables come last, and there is one at most"
    return DeviceCaches(tables, states[0] if states else None, info.both_ways)
