"""The blocks of one KV group: reference counts, a constant-time free list, and the keys of cached blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping

NULL_BLOCK = 0


class BlockPool:
    """Hands out block ids 1 to num_blocks - 1; block 0 is the null block and never leaves.

    A block is in exactly one of three states: referenced by at least one table; free without a key (`_plain`, reused
    first); or free with a key (`_cached`, in the order in which they are reused: those freed first, but for
    those freed with `before_others`). A block with a key holds what the key describes, referenced or not.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 2, "a pool needs the null block and one more"
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._plain = list(range(num_blocks - 1, NULL_BLOCK, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._block_by_key: dict[bytes, int] = {}
        self._key_by_block: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can give, those that still hold a cached prefix included."""
        return len(self._plain) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks that have a key."""
        return len(self._key_by_block)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, each with one reference; the caller has checked `num_free`."""
        assert count <= self.num_free, "allocate beyond num_free"
        return [self._take() for _ in range(count)]

    def _take(self) -> int:
        if self._plain:
            block = self._plain.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            del self._block_by_key[self._key_by_block.pop(block)]
        self._references[block] = 1
        return block

    def share(self, block: int) -> None:
        """Add a reference to a block that has a key."""
        assert block in self._key_by_block, "only a block with a key can be shared"
        if self._references[block] == 0:
            del self._cached[block]
        self._references[block] += 1

    def free(self, blocks: Iterable[int], *, before_others: bool = False) -> None:
        """Give back one reference of each, in the order in which they may be evicted; null blocks are skipped.

        With `before_others`, what they hold is forgotten before what was freed earlier, the last one's first.
        """
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            left = self._references[block] - 1
            assert left >= 0, f"block {block} was freed twice"
            self._references[block] = left
            if left == 0:
                if block in self._key_by_block:
                    self._cached[block] = None
                    if before_others:
                        self._cached.move_to_end(block, last=False)
                else:
                    self._plain.append(block)

    def find(self, key: bytes) -> int | None:
        """The block that holds what `key` describes."""
        return self._block_by_key.get(key)

    def holds(self, key: bytes) -> bool:
        """True if a block has this key."""
        return key in self._block_by_key

    def is_free(self, block: int) -> bool:
        """True if no table references the block."""
        return self._references[block] == 0

    def set_key(self, block: int, key: bytes) -> None:
        """Name the content of a referenced block; does nothing if another block already has that key."""
        assert self._references[block] > 0, "only a referenced block can get a key"
        if key not in self._block_by_key:
            assert block not in self._key_by_block, f"block {block} already has a key"
            self._block_by_key[key] = block
            self._key_by_block[block] = key

    def rename_key(self, key: bytes, new: bytes) -> None:
        """Name what has one key by another; does nothing if no block has it any more, and drops it if one has `new`."""
        if new in self._block_by_key:
            self.drop_key(key)
        elif key in self._block_by_key:
            block = self._block_by_key.pop(key)
            self._block_by_key[new] = block
            self._key_by_block[block] = new

    def drop_key(self, key: bytes) -> None:
        """Forget that a block holds this content, if one does."""
        block = self._block_by_key.pop(key, None)
        if block is None:
            return
        del self._key_by_block[block]
        if self._references[block] == 0:
            del self._cached[block]
            self._plain.append(block)

    def forget(self, block: int) -> None:
        """A referenced block is about to hold something else than its key describes, if it has one."""
        assert self._references[block] == 1, "others still need what the block holds"
        key = self._key_by_block.pop(block, None)
        if key is not None:
            del self._block_by_key[key]

    def has_key(self, block: int) -> bool:
        """True if others can find what the block holds."""
        return block in self._key_by_block

    def is_shared(self, block: int) -> bool:
        """True if more than one table references the block."""
        return self._references[block] > 1

    def clear_keys(self) -> None:
        """Forget all cached content; references stay."""
        self._plain.extend(self._cached)
        self._cached.clear()
        self._block_by_key.clear()
        self._key_by_block.clear()

    def check(self, references: Mapping[int, int]) -> None:
        """Assert every invariant; `references` counts how often each block stands in a table."""
        for block in range(1, self.num_blocks):
            assert self._references[block] == references.get(block, 0), f"block {block}: wrong reference count"
        assert NULL_BLOCK not in references, "the null block stands in a table as a block"
        assert self._references[NULL_BLOCK] == 0, "the null block was handed out"
        plain = set(self._plain)
        assert len(plain) == len(self._plain), "a block is twice in the free list"
        assert not plain & self._cached.keys(), "a block is in both free lists"
        for block in plain | self._cached.keys():
            assert self._references[block] == 0, f"block {block} is free and referenced"
        used = sum(count > 0 for count in self._references)
        assert used + self.num_free + 1 == self.num_blocks, "blocks were lost"
        assert all(block in self._key_by_block for block in self._cached), "a cached block has no key"
        assert not any(block in self._key_by_block for block in plain), "a plain block has a key"
        assert {block: key for key, block in self._block_by_key.items()} == self._key_by_block, "key maps disagree"
        assert len(self._block_by_key) == len(self._key_by_block), "two keys name one block"
