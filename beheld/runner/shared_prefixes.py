"""Which of a step's decoding sequences share their first blocks with neighbours in the batch.

A kernel reads a prefix that neighbours share once for all of them (attention/triton_shared.py). Neighbours are the
sequences 8i to 8i + 7 of a batch:

    tables    5 9 2 7 | 5 9 2 8 | 5 9 4 | 6 3         of four neighbours, block_size 4
    shared        8         8       8      0           positions, if two blocks are worth it

Shapes: B sequences, G groups of blocks, R rows, N blocks of a table, E neighbours.
"""

from __future__ import annotations

import numpy as np

from beheld.attention.backend import Sharing
from beheld.runner.rows import Rows


class SharedPrefixes:
    """Finds shared prefixes in the block tables, and keeps what it found while the same sequences decode.

    Args:
        groups: the groups whose layers see all positions.
        sharing: what the kernel takes, and from where on it is worth it.
    """

    def __init__(self, rows: Rows, groups: list[int], block_size: int, sharing: Sharing) -> None:
        self._rows, self._groups, self._block_size = rows, groups, block_size
        self._num_neighbours = sharing.neighbours
        self._min_blocks = -(-sharing.min_positions // block_size)
        self._min_total = sharing.min_total
        self._found: tuple[tuple[bytes, int], np.ndarray | None] = ((b"", -1), None)

    def find(self, rows_B: np.ndarray, starts_B: np.ndarray) -> np.ndarray | None:
        """Return how many positions each sequence shares, int64; None if they share too little.

        Args:
            rows_B: their rows.
            starts_B: the positions that the step computes; all before them are in the cache.
        """
        key = (rows_B.tobytes(), self._rows.num_admitted)
        if self._found[0] != key:
            self._found = (key, self._search(rows_B, starts_B // self._block_size))
        return self._found[1]

    def _search(self, rows_B: np.ndarray, num_blocks_B: np.ndarray) -> np.ndarray | None:
        least = max(1, self._min_total // self._block_size)
        if not self._groups or num_blocks_B.max() < self._min_blocks or num_blocks_B.sum() < least:
            return None
        tables_BN = self._rows.tables_GRN[self._groups[0], rows_B]
        # Only those with the same block there can share enough. Blocks are numbered from 1.
        last_B = np.where(num_blocks_B >= self._min_blocks, tables_BN[:, self._min_blocks - 1], 0)
        shared_B = np.zeros(len(rows_B), dtype=np.int64)
        for first in range(0, len(rows_B), self._num_neighbours):
            here = slice(first, first + self._num_neighbours)
            candidates, counts = np.unique(last_B[here], return_counts=True)
            counts[candidates == 0] = 0
            if counts.max() < 2:
                continue
            members = first + np.flatnonzero(last_B[here] == candidates[counts.argmax()])
            shared_B[here] = self._of_members(rows_B, num_blocks_B, members, here)
        return shared_B if shared_B.sum() >= self._min_total else None

    def _of_members(self, rows_B: np.ndarray, num_blocks_B: np.ndarray, members: np.ndarray, here: slice) -> np.ndarray:
        """Return what these neighbours share, by the number of blocks that saves most reading."""
        most = int(num_blocks_B[members].max())
        same_EN = np.ones((len(members), most), dtype=bool)
        for group in self._groups:
            tables_EN = self._rows.tables_GRN[group, rows_B[members], :most]
            same_EN &= tables_EN == tables_EN[num_blocks_B[members].argmax()]
        same_EN &= np.arange(most) < num_blocks_B[members][:, None]
        shared_E = np.where(same_EN.all(axis=1), most, same_EN.argmin(axis=1))
        depths = np.sort(shared_E)[::-1]
        saved = depths * np.arange(len(depths))
        best = int(saved.argmax())
        depth = depths[best]
        shared = np.zeros(here.stop - here.start, dtype=np.int64)[: len(rows_B) - here.start]
        if best and depth >= self._min_blocks:
            shared[members[shared_E >= depth] - here.start] = depth * self._block_size
        return shared
