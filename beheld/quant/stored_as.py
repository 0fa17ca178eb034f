"""How a weight's dimensions lie in a checkpoint's entries, so that a rank reads its part of them alone.

Four bits as AWQ stores them, N = 64, K = 256 in groups of 128; rank 0 of 2 by outputs, and by inputs:

    qweight (K, N / 8)     [:, :4]     [:128, :]
    qzeros (G, N / 8)      [:, :4]     [:1, :]
    scales (G, N)          [:, :32]    [:1, :]

Shapes: N outputs, K inputs, G groups of inputs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from beheld.parallel.shards import Cut, RankSlice


@dataclass(frozen=True)
class Axis:
    """A dimension of an entry.

    Attributes:
        dim: the dimension.
        each: how many of the weight's indices (outputs, say) one of it holds; several may hold one together.
    """

    dim: int
    each: Fraction | int = 1


# By entry: where each dimension of the weight lies in it; None: all of the dimension share it.
Axes = Mapping[str, tuple[Axis | None, ...]]


def group_axis(dim: int, inputs: int, groups: int) -> Axis | None:
    """Return where the groups of a weight's inputs lie, the last of which may be shorter; None for a single group."""
    return None if groups == 1 else Axis(dim, -(-inputs // groups))


@dataclass(frozen=True)
class StoredAs:
    """A weight's shape, and how its entries hold it.

    Attributes:
        shape: N and K of a linear layer.
        axes: of each entry.
    """

    shape: tuple[int, ...]
    axes: Axes

    def part(self, cut: Cut) -> StoredAs:
        """Return how a part is stored."""
        shape = (*self.shape[: cut.dim], cut.size, *self.shape[cut.dim + 1 :])
        return dataclasses.replace(self, shape=shape)

    def entries_of(self, entries: Mapping[str, Any], cut: Cut) -> dict[str, Any] | None:
        """Return the entries of a part, unread; None if it holds a part of an index, or zeros."""
        found: dict[str, Any] = {}
        for name, entry in entries.items():
            axis = self.axes[name][cut.dim]
            if axis is None:
                found[name] = entry
                continue
            size = entry.get_shape()[axis.dim]
            pieces = []
            for piece in cut.pieces:
                if not isinstance(piece, range):
                    return None
                start, stop = Fraction(piece.start) / axis.each, Fraction(piece.stop) / axis.each
                if piece.stop == self.shape[cut.dim]:
                    # The last index may hold fewer.
                    stop = Fraction(size)
                if start.denominator != 1 or stop.denominator != 1:
                    return None
                pieces.append(range(int(start), int(stop)))
            if not pieces:
                return None
            found[name] = RankSlice(entry, Cut(axis.dim, tuple(pieces)))
        return found
