"""What the fake device holds for each kind of layer group, in integers, and what it reads of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from beheld.core.config import KVGroup
from tests import toy_recurrent


@dataclass(frozen=True)
class Cell:
    """What was made of one position: the state there; `broken` if it is not a number."""

    state: int
    broken: bool


# A cell that is read, and the position that it should be of.
Read = tuple[Cell, int]


class FakeCache(Protocol):
    """One group's memory; a table is that of one sequence."""

    def admit(self, table: list[int], num_computed: int) -> None:
        """Check the table of a sequence whose first `num_computed` positions came from the prefix cache."""

    def append(self, table: list[int], blocks: Sequence[int], stop: int) -> None:
        """Extend a table for a slice that ends at `stop`."""

    def before(self, table: list[int], start: int) -> Iterator[Read]:
        """What a slice that begins at `start` reads of earlier steps."""

    def write(self, table: list[int], start: int, cells: Sequence[Cell]) -> None:
        """Store what was made of positions from `start` on."""

    def after(self, table: list[int], start: int, stop: int) -> Iterator[Read]:
        """What must be there once all slices of the step have written."""

    def truncate(self, table: list[int], stop: int) -> None:
        """Positions from `stop` on were written with wrong draft tokens."""


class FakePaged:
    """Each position has a cell of its own; a query sees `window` of them, or all."""

    def __init__(self, spec: KVGroup, num_blocks: int, block_size: int) -> None:
        self._num_blocks, self._size = num_blocks, block_size
        self._window = spec.window
        self._cells: dict[tuple[int, int], Cell] = {}

    def admit(self, table: list[int], num_computed: int) -> None:
        """The tables of a hit hold its blocks."""
        assert len(table) == num_computed // self._size, "the tables of a hit hold its blocks"

    def append(self, table: list[int], blocks: Sequence[int], stop: int) -> None:
        """Exactly the blocks that the slice reaches."""
        for block in blocks:
            assert 0 < block < self._num_blocks, f"block {block} does not exist"
        table.extend(blocks)
        assert len(table) == -(-stop // self._size), "exactly the blocks that the slice reaches"

    def before(self, table: list[int], start: int) -> Iterator[Read]:
        """Of the positions before `start`, those that the first query sees."""
        return self.after(table, start, start)

    def write(self, table: list[int], start: int, cells: Sequence[Cell]) -> None:
        """One position, one cell."""
        for position, cell in enumerate(cells, start):
            block = table[position // self._size]
            assert block != 0, "written to the null block"
            self._cells[block, position % self._size] = cell

    def after(self, table: list[int], start: int, stop: int) -> Iterator[Read]:
        """All that the first query sees, and all after it."""
        first = 0 if self._window is None else max(0, start - self._window + 1)
        for position in range(first, stop):
            block = table[position // self._size]
            assert block != 0, f"position {position} is seen and its block is gone"
            cell = self._cells.get((block, position % self._size))
            assert cell is not None, f"position {position} was never written"
            yield cell, position

    def truncate(self, table: list[int], stop: int) -> None:
        """Blocks behind go back."""
        del table[-(-stop // self._size) :]

    def bytes_of(self, block: int) -> np.ndarray:
        """What a block holds whose positions have all been written."""
        cells = [self._cells[block, place] for place in range(self._size)]
        return np.array([number for cell in cells for number in (cell.state, cell.broken)], np.int64).view(np.uint8)

    def fill(self, block: int, data: np.ndarray) -> None:
        """Take what `bytes_of` gave."""
        assert 0 < block < self._num_blocks, f"block {block} does not exist"
        numbers = data.view(np.int64).tolist()
        for place in range(self._size):
            self._cells[block, place] = Cell(numbers[2 * place], bool(numbers[2 * place + 1]))


class FakeStates:
    """States belong to items: there are no blocks, and nothing of a position."""

    def __init__(self, spec: KVGroup, num_blocks: int, block_size: int) -> None:
        pass

    def admit(self, table: list[int], num_computed: int) -> None:
        """A hit brings nothing."""
        assert not table, "states of items take no blocks"

    def append(self, table: list[int], blocks: Sequence[int], stop: int) -> None:
        """A slice brings nothing."""
        assert not blocks, "states of items take no blocks"

    def before(self, table: list[int], start: int) -> Iterator[Read]:
        """Nothing is read."""
        return iter(())

    def write(self, table: list[int], start: int, cells: Sequence[Cell]) -> None:
        """Nothing is written."""

    def after(self, table: list[int], start: int, stop: int) -> Iterator[Read]:
        """Nothing is read."""
        return iter(())

    def truncate(self, table: list[int], stop: int) -> None:
        """There is nothing to take back."""


class FakeRecurrent:
    """A block has one cell, the state at its end, or after the last position before that.

    A block that moved along with the newest state stands more than once in a table, and holds the newest alone.
    """

    def __init__(self, spec: KVGroup, num_blocks: int, block_size: int) -> None:
        self._num_blocks, self._size = num_blocks, block_size
        self._cells: dict[int, Cell] = {}

    def admit(self, table: list[int], num_computed: int) -> None:
        """A hit brings the last block alone."""
        assert len(table) == num_computed // self._size, "the tables of a hit cover it"
        assert not any(table[:-1]), "a hit brings more than the state to continue from"

    def append(self, table: list[int], blocks: Sequence[int], stop: int) -> None:
        """Null blocks where no state is kept."""
        for block in blocks:
            assert 0 <= block < self._num_blocks, f"block {block} does not exist"
        table.extend(blocks)
        assert len(table) == -(-stop // self._size), "exactly the blocks that the slice reaches"

    def before(self, table: list[int], start: int) -> Iterator[Read]:
        """The state to continue from."""
        if start > 0:
            yield self._cell(table[(start - 1) // self._size]), start - 1

    def write(self, table: list[int], start: int, cells: Sequence[Cell]) -> None:
        """The state at the end of every block that is kept, and the newest."""
        for index, last in self._kept(table, start, start + len(cells)):
            self._cells[table[index]] = cells[last - start]

    def after(self, table: list[int], start: int, stop: int) -> Iterator[Read]:
        """What was written, and the state before it, which nobody else may have taken in this very step."""
        moved = start > 0 and table[(start - 1) // self._size] == table[(stop - 1) // self._size]
        if start % self._size == 0 and not moved:
            yield from self.before(table, start)
        for index, last in self._kept(table, start, stop):
            yield self._cell(table[index]), last

    def truncate(self, table: list[int], stop: int) -> None:
        """It cannot be."""
        raise AssertionError("a state cannot be taken back")

    def _kept(self, table: list[int], start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Index of each block of the slice that is kept, and the last position before its end."""
        last = (stop - 1) // self._size
        assert table[last] != 0, "there is no block for the newest state"
        for index in range(start // self._size, last + 1):
            if table[index] and (index == last or table[index] != table[last]):
                yield index, min((index + 1) * self._size, stop) - 1

    def _cell(self, block: int) -> Cell:
        assert block in self._cells, "a state is read that was never written"
        return self._cells[block]


KINDS: dict[str, Callable[[KVGroup, int, int], FakeCache]] = {
    **dict.fromkeys(("full", "sliding", "chunked", "conv", "latent"), FakePaged),
    "cross": FakeStates,
    "recurrent": FakeRecurrent,
    toy_recurrent.KIND: FakeRecurrent,
}
