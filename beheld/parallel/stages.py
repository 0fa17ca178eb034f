"""Which layers each stage of a pipeline holds, and what stages send each other.

    stage 0     towers, embeddings, layers 0 .. a - 1
    stage 1     layers a .. b - 1
    the last    layers b .., the last norm, the head; it samples

Rank 0, in the engine's process, is of the last stage, so that what samples and what plans are in one place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from beheld.core.config import KVGroup, ModelInfo
from beheld.core.errors import ConfigError


@dataclass(frozen=True)
class StagePlan:
    """One stage's layers.

    Attributes:
        bounds: the first layer of each stage, and the number of layers.
    """

    stage: int
    bounds: tuple[int, ...]

    @property
    def layers(self) -> range:
        """This stage's layers."""
        return range(self.bounds[self.stage], self.bounds[self.stage + 1])

    def local(self, info: ModelInfo) -> ModelInfo:
        """Return the model's facts with this stage's layers alone in its cache groups."""
        return dataclasses.replace(info, kv_groups=tuple(_within(group, self.layers) for group in info.kv_groups))

    def widest(self, info: ModelInfo) -> ModelInfo:
        """Return the facts with as many layers in each group as the stage with most of them has.

        All stages number the same blocks, so all measure their caches by this.
        """
        stages = [dataclasses.replace(self, stage=stage) for stage in range(len(self.bounds) - 1)]
        groups = zip(*(each.local(info).kv_groups for each in stages), strict=True)
        most = tuple(max(group, key=lambda own: len(own.layers)) for group in groups)
        return dataclasses.replace(info, kv_groups=most)


def _within(group: KVGroup, layers: range) -> KVGroup:
    return dataclasses.replace(
        group,
        layers=tuple(layer for layer in group.layers if layer in layers),
        readers=tuple(pair for pair in group.readers if pair[0] in layers),
    )


def cuts(count: int, info: ModelInfo, stages: int) -> list[int]:
    """Return before which of so many layers a stage may begin.

    Raises:
        ConfigError: the layers cannot be cut into so many stages.
    """
    joined = {
        place
        for group in info.kv_groups
        for reader, source in group.readers
        for place in range(min(reader, source) + 1, max(reader, source) + 1)
    }
    places = [place for place in range(1, count) if place not in joined]
    if len(places) < stages - 1:
        raise ConfigError(
            f"The model's layers cannot be cut into {stages} stages.",
            f"Give pipeline_parallel_size={len(places) + 1} at most.",
            param="pipeline_parallel_size",
        )
    return places


def split(sizes: Sequence[int], first: int, last: int, info: ModelInfo, stages: int) -> tuple[int, ...]:
    """Return the bounds of stages whose largest has as few bytes as possible.

    Layers that read another layer's keys and values are in its stage.

    Args:
        sizes: bytes of each layer.
        first, last: further bytes of the first and of the last stage.

    Raises:
        ConfigError: the layers cannot be cut into so many stages.
    """
    count = len(sizes)
    places = cuts(count, info, stages)
    before = [0]
    for size in sizes:
        before.append(before[-1] + size)
    # Place -> the least size of the largest stage up to it, and the bounds.
    best: dict[int, tuple[int, tuple[int, ...]]] = {place: (before[place] + first, (0,)) for place in [*places, count]}
    for stage in range(1, stages):
        own = last if stage == stages - 1 else 0
        best = {
            stop: min(
                (max(most, before[stop] - before[start] + own), (*bounds, start))
                for start, (most, bounds) in best.items()
                if start < stop
            )
            for stop in [*places, count]
            if any(start < stop for start in best)
        }
    return (*best[count][1], count)
