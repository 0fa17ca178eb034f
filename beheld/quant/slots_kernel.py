"""What the programs of a grouped product find out: which slots of which expert are theirs.

A slot is a token and one of its experts. Slots are processed in the order of experts, tile by tile; a tile never holds
slots of two experts (see the figure in float8_kernel.py). A few slots need no sorting: each program looks at all.

Shapes: S slots, T of a tile, E experts.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from beheld.quant.slots import UNSORTED


@triton.jit
def tile_slots(order_ptr, starts_ptr, num_slots, num_experts, T: tl.constexpr, E: tl.constexpr, SORTED: tl.constexpr):
    """Return the expert of this program's tile, the tile's slots (T,), and how many there are; slots beyond are 0.

    Args:
        order_ptr: slots by expert, or the slots' experts if they are not SORTED.
        starts_ptr: where each expert starts there, and the end of the last; unused if slots are not SORTED.
    """
    tile = tl.program_id(0)
    t_T = tl.arange(0, T)
    if SORTED:
        e_E = tl.arange(0, E)
        starts_E = tl.load(starts_ptr + e_E, mask=e_E < num_experts, other=0).to(tl.int32)
        stops_E = tl.load(starts_ptr + e_E + 1, mask=e_E < num_experts, other=0).to(tl.int32)
        last_tiles_E = tl.cumsum((stops_E - starts_E + T - 1) // T, 0)
        expert = tl.sum((last_tiles_E <= tile).to(tl.int32), 0)
        before = tl.max(tl.where(e_E < expert, last_tiles_E, 0), 0)
        own = tl.minimum(expert, num_experts - 1)
        start = tl.load(starts_ptr + own).to(tl.int32) + (tile - before) * T
        count = tl.where(expert < num_experts, tl.load(starts_ptr + own + 1).to(tl.int32) - start, 0)
        slot_T = tl.load(order_ptr + start + t_T, mask=t_T < count, other=0).to(tl.int64)
    else:
        expert = tile
        its_T = tl.load(order_ptr + t_T, mask=t_T < num_slots, other=-1).to(tl.int32) == expert
        count = tl.sum(its_T.to(tl.int32), 0)
        place_T = tl.where(its_T, tl.cumsum(its_T.to(tl.int32), 0) - 1, -1)
        # One by one: the slot whose place is t.
        slot_T = tl.sum(tl.where(place_T[None, :] == t_T[:, None], t_T[None, :], 0), 1).to(tl.int64)
    return expert, slot_T, count


def num_tiles(slots: int, experts: int, size: int) -> int:
    """Return an upper bound of the number of tiles of this size."""
    if slots <= UNSORTED:
        return experts
    # Each expert with slots fills at most one tile in part.
    return min(slots, triton.cdiv(slots, size) + experts)
