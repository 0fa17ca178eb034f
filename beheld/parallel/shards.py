"""Which part of a weight a rank holds: ranges of one dimension, and zeros where sizes do not divide.

25 heads, 2 ranks       rank 0   heads 0 .. 12         rank 1   heads 13 .. 24, and one of zeros
8 heads, 2 of keys      rank 0   0 1 | key 0           each head of keys lies on two of four ranks
and 4 ranks             rank 1   2 3 | key 0
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# 16-bit matrix products need sizes that are multiples of this.
_ALIGNED = 8


@dataclass(frozen=True)
class Zeros:
    """So many entries of zero."""

    count: int


Piece = range | Zeros


@dataclass(frozen=True)
class Cut:
    """A rank's part of a weight: these pieces of one dimension, in order."""

    dim: int
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        """The part's size along the dimension."""
        return sum(len(piece) if isinstance(piece, range) else piece.count for piece in self.pieces)

    def of(self, weight: Any, shape: Sequence[int]) -> Tensor:
        """Return the part of a weight of this shape: a tensor, or a slice of a file, of which no more is read."""
        around = (slice(None),) * self.dim
        parts = [weight[(*around, slice(p.start, p.stop))] for p in self.pieces if isinstance(p, range) and len(p)]
        # A part without any entry still needs the type.
        like = parts[0] if parts else weight[(*around, slice(0, 1))]
        sizes = [(*shape[: self.dim], -1, *shape[self.dim + 1 :])]
        found: list[Tensor] = []
        for piece in self.pieces:
            if isinstance(piece, Zeros):
                if piece.count:
                    found.append(like.new_zeros([piece.count if size == -1 else size for size in sizes[0]]))
            elif len(piece):
                found.append(parts.pop(0))
        return found[0].contiguous() if len(found) == 1 else torch.cat(found, dim=self.dim)


class RankSlice:
    """A weight, or an entry of a file, of which a rank reads its part, in place of the whole.

    Args:
        weight: the whole, unread.
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

    def get_shape(self) -> list[int]:
        """Return the part's shape, as a slice of a safetensors file does."""
        shape = list(self._weight.get_shape())
        shape[self._cut.dim] = self._cut.size
        return shape


def share(size: int, rank: int, ranks: int, unit: int = 1) -> tuple[Piece, ...]:
    """Return a rank's pieces of `size` entries: equally many on every rank, the last ones padded by zeros.

    Args:
        unit: what a rank's number of entries is a multiple of, a divisor of 8.
    """
    each = size // ranks if size % (ranks * unit) == 0 else -(-size // (ranks * _ALIGNED)) * _ALIGNED
    start, stop = min(rank * each, size), min((rank + 1) * each, size)
    return _merged([range(start, stop), Zeros(each - (stop - start))])


def blocks(indices: Iterable[int | None], width: int, start: int = 0) -> tuple[Piece, ...]:
    """Return the pieces of blocks, by index, of `width` entries; block 0 begins at `start`, and None means zeros."""
    return _merged(
        Zeros(width) if index is None else range(start + index * width, start + (index + 1) * width)
        for index in indices
    )


def sections(count: int, size: int, rank: int, ranks: int, unit: int = 1) -> tuple[Piece, ...]:
    """Return a rank's pieces of `count` sections of `size` entries, such as gate and up, each shared out alike."""
    own = share(size, rank, ranks, unit)
    return tuple(
        piece if isinstance(piece, Zeros) else range(piece.start + first, piece.stop + first)
        for first in range(0, count * size, size)
        for piece in own
    )


def pairs(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """Return the pieces of units that take two entries each, side by side."""
    return tuple(
        Zeros(2 * piece.count) if isinstance(piece, Zeros) else range(2 * piece.start, 2 * piece.stop)
        for piece in pieces
    )


def _merged(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """Join neighbours, and drop empty pieces."""
    out: list[Piece] = []
    for piece in pieces:
        last = out[-1] if out else None
        if isinstance(piece, Zeros):
            if isinstance(last, Zeros):
                out[-1] = Zeros(last.count + piece.count)
            elif piece.count:
                out.append(piece)
        elif isinstance(last, range) and last.stop == piece.start:
            out[-1] = range(last.start, piece.stop)
        elif len(piece):
            out.append(piece)
    return tuple(out)


@dataclass(frozen=True)
class Heads:
    """A rank's attention heads; None is a head of zeros.

    Attributes:
        queries: its heads of queries, those of one head of keys next to each other.
        keys: its heads of keys and values.
    """

    queries: tuple[int | None, ...]
    keys: tuple[int | None, ...]


def heads_of(num_heads: int, num_kv_heads: int, rank: int, ranks: int) -> Heads:
    """Return a rank's heads: equally many on every rank, each with its head of keys and values.

    With fewer heads of keys than ranks, each of them lies on several ranks, which share its heads of queries.
    """
    group = num_heads // num_kv_heads
    if num_kv_heads >= ranks:
        each = -(-num_kv_heads // ranks)
        own = range(rank * each, (rank + 1) * each)
        keys = tuple(key if key < num_kv_heads else None for key in own)
        queries = tuple(None if key is None else key * group + i for key in keys for i in range(group))
        return Heads(queries, keys)
    distinct = next(count for count in range(num_kv_heads, ranks + 1) if ranks % count == 0)
    owners = ranks // distinct
    each = -(-group // owners)
    key, part = divmod(rank, owners)
    if key >= num_kv_heads:
        return Heads((None,) * each, (None,))
    own = range(part * each, (part + 1) * each)
    return Heads(tuple(key * group + i if i < group else None for i in own), (key,))
