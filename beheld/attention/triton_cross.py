"""Cross-attention to states of media items in one Triton kernel that reads the states in place.

Shapes: T tokens of the step, H query heads, K key-value heads, G = H / K of them in a group, C head size, E states, W
work items, P pieces, R rows of a tile (queries: tokens times G), N states of a tile.

A run's tokens are cut into tiles of a few tokens. A run's states may be spread over several tensors; a work item is one
tile and a part of the run's states, given as a range of pieces, each within one tensor:

    run 0, tile 0      |item 0: piece 0     |item 1: piece 1, 2   |      two items of states, the second one short
    run 0, tile 1      |item 2: piece 0, 1, 2 ...                        (simplified)
    tokens of no run   |item 3: no piece                                 their rows are zero

Parts of one tile leave their sums in a workspace, and the last part to finish joins them: one launch per layer. All
numbers come from one table, copied to the device once per step; layers compute what differs between them from it.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from beheld.attention.backend import Further
from beheld.attention.cross import CrossMetadata, CrossRun, attend_with_sums
from beheld.attention.triton_math import accumulate, join, products, unit
from beheld.platform.registry import platform_of

# Fields of a work item: first and stop of its tokens in the token list, first and stop of its pieces, its number among
# its tile's parts, number of parts, index of the tile's first part in the workspace.
_ITEM_FIELDS = 8
# Fields of a piece: address of its first key in the first layer, bytes to the next layer, bytes from keys to values,
# number of states.
_PIECE_FIELDS = 4
# Parts consist of whole tiles, whatever the tile size.
_TILES = 64
# A shorter part costs more to join than it saves in reading.
_MIN_PART = 128
# One program joins all parts of a tile, which takes longer the more there are.
_MAX_PARTS = 32
# Programs of the kernel that run concurrently on one multiprocessor.
_PROGRAMS_PER_SM = 3


@dataclass(frozen=True)
class _Shape:
    """The launch shape of a program.

    Attributes:
        tokens: per tile.
        rows: queries per tile, a power of two.
        states: per tile.
        joined: parts that are joined at a time, limited by registers.
    """

    tokens: int
    rows: int
    states: int
    warps: int
    stages: int
    joined: int


@dataclass(frozen=True, eq=False)
class _Plan:
    """What all layers of the group share in one step.

    Attributes:
        items_W8, pieces_P4, tokens_T: the table, int64; tokens are indices into the step's, each in one item's range.
        arrived: the number of finished parts, per workspace index and key-value head; zero between launches.
        acc, sums: the workspace.
    """

    shape: _Shape
    items_W8: Tensor
    pieces_P4: Tensor
    tokens_T: Tensor
    arrived: Tensor
    acc: Tensor
    sums: Tensor


@triton.jit(do_not_specialize=["layer"], do_not_specialize_on_alignment=["items_ptr", "pieces_ptr", "tokens_ptr"])
def _cross(
    q_ptr,
    out_ptr,
    items_ptr,
    pieces_ptr,
    tokens_ptr,
    acc_ptr,
    sums_ptr,
    arrived_ptr,
    layer,
    scale,
    q_token,
    q_head,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    JOINED: tl.constexpr,
):
    """One program computes one work item and one key-value head with all its query heads."""
    head = tl.program_id(0)
    item_ptr = items_ptr + tl.program_id(1) * 8
    first = tl.load(item_ptr + 0)
    stop = tl.load(item_ptr + 1)
    first_piece = tl.load(item_ptr + 2).to(tl.int32)
    stop_piece = tl.load(item_ptr + 3).to(tl.int32)
    part = tl.load(item_ptr + 4).to(tl.int32)
    parts = tl.load(item_ptr + 5).to(tl.int32)
    place = tl.load(item_ptr + 6).to(tl.int32)
    row_R = tl.arange(0, ROWS)
    c_C = tl.arange(0, WIDTH)
    inside_C = c_C < SIZE
    there_R = (row_R < TOKENS * GROUP) & (first + row_R // GROUP < stop)
    token_R = tl.load(tokens_ptr + first + row_R // GROUP, mask=there_R, other=0)
    head_R = head * GROUP + row_R % GROUP
    inside_RC = there_R[:, None] & inside_C[None, :]
    q_RC = tl.load(
        q_ptr + token_R[:, None] * q_token + head_R[:, None] * q_head + c_C[None, :], mask=inside_RC, other=0.0
    )
    factor = unit(scale, False)
    m_R = tl.full([ROWS], float("-inf"), tl.float32)
    l_R = tl.zeros([ROWS], tl.float32)
    acc_RC = tl.zeros([ROWS, WIDTH], tl.float32)
    for piece in range(first_piece, stop_piece):
        piece_ptr = pieces_ptr + piece * 4
        keys = tl.load(piece_ptr + 0) + layer * tl.load(piece_ptr + 1)
        values = keys + tl.load(piece_ptr + 2)
        count = tl.load(piece_ptr + 3).to(tl.int32)
        keys_ptr = tl.multiple_of(keys.to(tl.pointer_type(q_ptr.dtype.element_ty)), ALIGNMENT)
        values_ptr = tl.multiple_of(values.to(tl.pointer_type(q_ptr.dtype.element_ty)), ALIGNMENT)
        for state in range(0, count, TILE):
            state_N = state + tl.arange(0, TILE)
            live_N = state_N < count
            inside_NC = live_N[:, None] & inside_C[None, :]
            line_NC = (state_N * KV_HEADS + head)[:, None] * SIZE + c_C[None, :]
            k_NC = tl.load(keys_ptr + line_NC, mask=inside_NC, other=0.0)
            s_RN = tl.where(live_N[None, :], products(q_RC, k_NC), float("-inf"))
            v_NC = tl.load(values_ptr + line_NC, mask=inside_NC, other=0.0)
            m_R, l_R, acc_RC = accumulate(s_RN, v_NC, m_R, l_R, acc_RC, factor, False)
    out_RC = out_ptr + ((token_R * KV_HEADS * GROUP + head_R) * SIZE)[:, None] + c_C[None, :]
    if parts == 1:
        # A tile without states gives zero.
        tl.store(out_RC, acc_RC / tl.where(l_R == 0.0, 1.0, l_R)[:, None], mask=inside_RC)
    else:
        line_R = ((place + part) * KV_HEADS + head) * ROWS + row_R
        tl.store(acc_ptr + line_R[:, None] * SIZE + c_C[None, :], acc_RC, mask=inside_C[None, :])
        tl.store(sums_ptr + line_R * 2, m_R * factor)
        tl.store(sums_ptr + line_R * 2 + 1, l_R)
        # All threads' results must be written before one thread signals that they are.
        tl.debug_barrier()
        counter_ptr = arrived_ptr + place * KV_HEADS + head
        if tl.atomic_add(counter_ptr, 1, sem="acq_rel") == parts - 1:
            _, total_R, joined_RC = join(
                acc_ptr, sums_ptr, place, 1, parts, head, KV_HEADS, ROWS, SIZE, ROWS, WIDTH, JOINED
            )
            tl.store(out_RC, joined_RC / total_R[:, None], mask=inside_RC)
            tl.store(counter_ptr, 0)


class TritonCross:
    """See CrossBackend; any head and group size. It copies no states and never synchronizes."""

    name = "triton"

    def __init__(self) -> None:
        self._programs: dict[torch.device, int] = {}

    def attend(self, q_THC: Tensor, index: int, metadata: CrossMetadata, scale: float) -> Tensor:
        """See CrossBackend; returns (T, H, C), contiguous."""
        if "triton" not in metadata.extra:
            metadata.extra["triton"] = self._planned(q_THC, metadata.runs)
        q_THC = q_THC if q_THC.stride(2) == 1 else q_THC.contiguous()
        out_THC = torch.empty(q_THC.shape, dtype=q_THC.dtype, device=q_THC.device)
        kv_heads = metadata.runs[0].states[0].shape[3]
        _launch(q_THC, out_THC, kv_heads, index, metadata.extra["triton"], scale)
        return out_THC

    def attend_with_sums(self, q_THC: Tensor, index: int, metadata: CrossMetadata, scale: float) -> Further:
        """See CrossBackend; in plain PyTorch."""
        return attend_with_sums(q_THC, index, metadata, scale)

    def _planned(self, q_THC: Tensor, runs: Sequence[CrossRun]) -> _Plan:
        num_tokens, heads, size = q_THC.shape
        first = runs[0].states[0]
        kv_heads = first.shape[3]
        assert first.shape[4] == size, "states of another size"
        assert (first.dtype, first.stride()[3:]) == (q_THC.dtype, (size, 1)), "states of another layout"
        most = max(run.num_tokens for run in runs)
        shape = shape_of(most, heads // kv_heads, q_THC.element_size())
        table = _Table(num_tokens, shape.tokens, kv_heads * size * q_THC.element_size())
        table.fill(runs, max(1, self._side_by_side(q_THC.device) // kv_heads))
        items_W8, pieces_P4, tokens_T = table.upload(q_THC.device)
        places = table.num_places * kv_heads
        return _Plan(
            shape,
            items_W8,
            pieces_P4,
            tokens_T,
            arrived=torch.zeros(places, dtype=torch.int32, device=q_THC.device),
            acc=torch.empty((places, shape.rows, size), dtype=torch.float32, device=q_THC.device),
            sums=torch.empty((places, shape.rows, 2), dtype=torch.float32, device=q_THC.device),
        )

    def _side_by_side(self, device: torch.device) -> int:
        """Return the number of programs that the device runs at a time."""
        known = self._programs.get(device)
        if known is None:
            facts = platform_of(device).kernel_facts(device)
            known = self._programs[device] = _PROGRAMS_PER_SM * facts.multiprocessors
        return known


class _Table:
    """Builds a step's table on the host.

    Args:
        num_tokens: T.
        tile: tokens per tile.
        state_bytes: of one state's keys in one layer; the next state's follow directly.
    """

    def __init__(self, num_tokens: int, tile: int, state_bytes: int) -> None:
        self._tile = tile
        self._num_tokens = num_tokens
        self._state_bytes = state_bytes
        # Flat lists of fields: nested lists take long to copy.
        self._items: list[int] = []
        self._pieces: list[int] = []
        self._tokens: list[int] = []
        self.num_places = 0

    def fill(self, runs: Sequence[CrossRun], target: int) -> None:
        """Add all runs, as about `target` work items or one per tile if there are more, and tokens without a run."""
        blind = np.ones(self._num_tokens, dtype=bool)
        num_states = [sum(len(item) for item in run.states) for run in runs]
        total = sum(-(-run.num_tokens // self._tile) * count for run, count in zip(runs, num_states, strict=True))
        share = max(_MIN_PART, -(-total // target))
        for run, count in zip(runs, num_states, strict=True):
            for low, high in run.ranges:
                blind[low:high] = False
            parts = min(_MAX_PARTS, -(-count // share))
            # Parts of one tile are equally long, in whole tiles.
            length = -(-count // (parts * _TILES)) * _TILES
            bounds = self._add_pieces(run.states, length)
            for low, high in run.ranges:
                self._tokens.extend(range(low, high))
            self._add_items(run.num_tokens, bounds)
        nothing = np.flatnonzero(blind).tolist()
        self._tokens.extend(nothing)
        self._add_items(len(nothing), [0, 0])

    def _add_pieces(self, states: Sequence[Tensor], length: int) -> list[int]:
        """Cut the states into parts of `length`; return where each part's pieces begin, and where the last one's end.

        states    |--------- a ---------|--- b ---|
        parts     |--- 0 ---|--- 1 ---|--- 2 ---|3|       pieces: a, a, a and b, b
        """
        bounds, left = [len(self._pieces) // _PIECE_FIELDS], length
        for item in states:
            begin, count, bytes_each = item.data_ptr(), len(item), item.element_size()
            state, layer, part = (step * bytes_each for step in item.stride()[:3])
            assert state == self._state_bytes, "states of another layout"
            low = 0
            while low < count:
                if not left:
                    bounds.append(len(self._pieces) // _PIECE_FIELDS)
                    left = length
                taken = min(left, count - low)
                self._pieces += (begin + low * state, layer, part, taken)
                low += taken
                left -= taken
        return [*bounds, len(self._pieces) // _PIECE_FIELDS]

    def _add_items(self, num_tokens: int, bounds: list[int]) -> None:
        """Add the tiles of the last `num_tokens` tokens, each with the parts whose pieces `bounds` separates."""
        parts = len(bounds) - 1
        stop = len(self._tokens)
        for first in range(stop - num_tokens, stop, self._tile):
            last = min(first + self._tile, stop)
            for part in range(parts):
                self._items += (first, last, bounds[part], bounds[part + 1], part, parts, self.num_places, 0)
            if parts > 1:
                self.num_places += parts

    def upload(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Return items (W, 8), pieces (P, 4) and tokens (T) on the device, by one asynchronous copy."""
        parts = (self._items, self._pieces, self._tokens)
        # Its memory is reused only after the copy from it has finished.
        host = torch.empty(sum(map(len, parts)), dtype=torch.int64, pin_memory=platform_of(device).pinned_memory)
        host.numpy()[:] = list(itertools.chain(*parts))
        items, pieces, tokens_T = host.to(device, non_blocking=True).split([len(part) for part in parts])
        return items.view(-1, _ITEM_FIELDS), pieces.view(-1, _PIECE_FIELDS), tokens_T


def _launch(q_THC: Tensor, out_THC: Tensor, kv_heads: int, index: int, plan: _Plan, scale: float) -> None:
    heads, size = q_THC.shape[1:]
    shape = plan.shape
    _cross[(kv_heads, len(plan.items_W8))](
        q_THC,
        out_THC,
        plan.items_W8,
        plan.pieces_P4,
        plan.tokens_T,
        plan.acc,
        plan.sums,
        plan.arrived,
        index,
        scale,
        *q_THC.stride()[:2],
        kv_heads,
        heads // kv_heads,
        size,
        alignment_of(size, q_THC.element_size()),
        shape.tokens,
        shape.rows,
        shape.states,
        max(16, triton.next_power_of_2(size)),
        shape.joined,
        num_warps=shape.warps,
        num_stages=shape.stages,
        enable_fp_fusion=True,
    )


def alignment_of(size: int, element_bytes: int) -> int:
    """Return the alignment in bytes of all states' addresses: one head's bytes, or the largest load if that is less."""
    return math.gcd(16, size * element_bytes)


def shape_of(most: int, group: int, element_bytes: int) -> _Shape:
    """Return the launch shape for runs of at most `most` tokens; it fits every GPU's shared memory."""
    if most == 1:
        rows = max(16, triton.next_power_of_2(group))
        return _Shape(1, rows, *((16, 4, 3) if element_bytes == 4 else (64, 4, 3)), joined=4)
    rows = max(32 if element_bytes == 4 else 64, triton.next_power_of_2(group))
    return _Shape(rows // group, rows, 32 if element_bytes == 4 else 64, 4, 2, joined=1)
