"""Keys of blocks, so that equal prefixes share them."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence as Ordered

from blake3 import blake3

from beheld.core.media import MediaSpan
from beheld.core.request import Request
from beheld.scheduler.sequence import Sequence

KEY_BYTES = 32


def root_key(request: Request, rope_scale: str = "short") -> bytes:
    """The parent of a request's first block: all that every key and value depends on, such as adapter and salt.

    Items with states are included if a position comes before the first of them, since a position that is shown no item
    attends to all of them; later positions have the item in an earlier block's key. An adapter is included with its
    number and with the digest of its files, because another one may have had the same number before.

        rotary scale (8) | lora (8) | bytes of its digest (8) | digest | number of items (8) | their digests | salt
    """
    lora = request.lora
    number, own = (0, b"") if lora is None else (lora.lora_int_id, lora.digest)
    attended = [span for span in request.spans if span.item.num_states]
    seen = [span.item.digest for span in attended] if attended and attended[0].start > 0 else []
    head = struct.pack("<qqq", rope_scale == "long", number, len(own)) + own + struct.pack("<q", len(seen))
    return blake3(b"".join((head, *seen, request.salt))).digest()


def block_key(parent: bytes, token_ids: Ordered[int], start: int, spans: Ordered[MediaSpan]) -> bytes:
    """The key of the block whose `token_ids` stand at positions `start` and following, after the block `parent`.

    `spans` are those that overlap it. Each is included with its whole digest and with its start relative to the block,
    because placeholders are the same for every image and for every row of one:

        parent (32) | token ids (8 each, a fixed number) | digest (32), span.start - start (8) | ...
    """
    return _key(parent, array("q", token_ids).tobytes(), start, spans)


def _key(parent: bytes, packed_ids: bytes, start: int, spans: Ordered[MediaSpan]) -> bytes:
    if not spans:
        return blake3(parent + packed_ids).digest()
    parts = [parent, packed_ids]
    for span in spans:
        assert len(span.item.digest) == KEY_BYTES, "a digest has 32 bytes"
        parts.append(span.item.digest)
        parts.append(struct.pack("<q", span.start - start))
    return blake3(b"".join(parts)).digest()


def extend_keys(sequence: Sequence, num_blocks: int, block_size: int) -> list[bytes]:
    """Compute the missing keys of the first `num_blocks` blocks, all of whose tokens are known; return all keys."""
    keys = sequence.block_keys
    if len(keys) >= num_blocks:
        return keys
    spans = sequence.request.spans
    parent = keys[-1] if keys else root_key(sequence.request, sequence.rope_scale)
    joint, known, size = sequence.joint, len(keys), 8 * block_size
    packed = array("q", sequence.token_ids[known * block_size : num_blocks * block_size]).tobytes()
    for index in range(known, num_blocks):
        start, stop = index * block_size, (index + 1) * block_size
        if joint is not None and start <= joint[0] < stop:
            # What the block holds depends on all positions of the range, later ones too.
            parent = block_key(parent, sequence.token_ids[slice(*joint)], joint[0], _within(spans, joint))
        first = sequence.key_span
        while first < len(spans) and spans[first].stop <= start:
            first += 1
        sequence.key_span = last = first
        while last < len(spans) and spans[last].start < stop:
            last += 1
        own = packed[(index - known) * size : (index - known + 1) * size]
        parent = _key(parent, own, start, spans[first:last])
        keys.append(parent)
    return keys


class PrefixKeys:
    """The keys of a sequence's blocks, computed only as far as a group asks: hashing takes long."""

    def __init__(self, sequence: Sequence, block_size: int) -> None:
        self._sequence = sequence
        self._block_size = block_size

    def first(self, num_blocks: int) -> list[bytes]:
        """At least the first `num_blocks`, all of whose tokens are known."""
        return extend_keys(self._sequence, num_blocks, self._block_size)


def _within(spans: Ordered[MediaSpan], joint: tuple[int, int]) -> list[MediaSpan]:
    """The spans that overlap the range."""
    return [span for span in spans if span.start < joint[1] and joint[0] < span.stop]
