"""Dense copies of decoding sequences' keys and values, so that a CPU need not gather them in each step.

While the same sequences decode together, each step appends one column: every sequence's newest key and value. Rows are
therefore aligned at their newest token, and a window covers the same columns in all rows:

    sequence 0   . . k0 k1 k2 | k3        . hidden by the mask
    sequence 1   k0 k1 k2 k3 k4 | k5      | what the last step added, to its right

The paged cache holds the same numbers and remains authoritative: a new set of sequences is gathered from it as usual,
and copied when the same set comes again. Copies take at most half of the paged cache's memory, and at most
`_MOST_BYTES`; layers without room are gathered.

Shapes: B sequences, K key-value heads, N = B K, G query heads for each of them, C key size, D value size, L columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from beheld.attention.backend import AttnMetadata, Further, GroupMetadata, LayerKV
from beheld.platform.registry import platform_of

# Copies have room for this many steps, and are then made again.
_ROOM = 64
_MOST_BYTES = 1 << 30


@dataclass(eq=False)
class DenseColumns:
    """The columns that one step reads of a group's copies.

    Attributes:
        start, stop: the visible columns; the newest tokens are in the last one.
        capacity: the number of columns allocated.
        serial: a unique number of this set of copies.
        slots_BL: in the step that makes the copies, the paged cache's slots of the columns up to `stop`; otherwise
            None.
        hidden_BL: which columns are padding; None if none is.
    """

    start: int
    stop: int
    capacity: int
    serial: int
    slots_BL: Tensor | None
    hidden_BL: Tensor | None
    mask_N1L: Tensor | None = None


@dataclass(eq=False)
class _Last:
    """The decoding sequences of a group's last step."""

    sequences: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()
    columns: DenseColumns | None = None


class DenseDecodeCache:
    """The copies of all layers, and the state of their groups."""

    def __init__(self) -> None:
        self._last: dict[int, _Last] = {}
        self._serial = 0
        self._buffers: dict[LayerKV, tuple[Tensor, Tensor]] = {}
        self._filled: dict[LayerKV, int] = {}

    def advance(self, index: int, metadata: AttnMetadata) -> DenseColumns | None:
        """Return the columns that this step reads of group `index`; None if keys are to be gathered."""
        if not platform_of(metadata.groups[index].tables_BN.device).dense_decode_cache:
            return None
        group, last = metadata.groups[index], self._last.setdefault(index, _Last())
        sequences = metadata.sequences[: metadata.num_decodes]
        starts, lengths = metadata.starts[: metadata.num_decodes], metadata.lengths[: metadata.num_decodes]
        # A relaunched step, after an error, does not follow itself.
        follows = bool(sequences) and sequences == last.sequences and starts == tuple(s + 1 for s in last.starts)
        last.sequences, last.starts = sequences, starts
        if not follows or (group.chunk is not None and max(lengths) > group.chunk):
            last.columns = None
        elif last.columns is None or last.columns.stop == last.columns.capacity:
            last.columns = self._first(metadata, group)
        else:
            known = last.columns
            stop = known.stop + 1
            start = max(known.start, stop - group.window) if group.window else known.start
            known.start, known.stop, known.slots_BL = start, stop, None
        return last.columns

    def _first(self, metadata: AttnMetadata, group: GroupMetadata) -> DenseColumns:
        """Return columns for all positions of the sequences, aligned at their newest tokens."""
        lengths_B1 = torch.tensor(metadata.lengths[: metadata.num_decodes]).unsqueeze(1)
        longest = int(lengths_B1.max())
        stop = min(longest, group.window) if group.window else longest
        # Column c of a row with n positions holds position n - stop + c.
        positions_BL = torch.arange(stop) + (lengths_B1 - stop)
        padding_BL = positions_BL < 0
        positions_BL.clamp_(min=0)
        blocks_BL = group.tables_BN[: metadata.num_decodes].long().gather(1, positions_BL // metadata.block_size)
        slots_BL = blocks_BL * metadata.block_size + positions_BL % metadata.block_size
        # The null block holds zeros; a freed block may hold NaN, which no mask can hide.
        slots_BL.masked_fill_(padding_BL, 0)
        hidden_BL = None
        if padding_BL.any():
            hidden_BL = torch.zeros(len(slots_BL), stop + _ROOM, dtype=torch.bool)
            hidden_BL[:, :stop] = padding_BL
        self._serial += 1
        return DenseColumns(0, stop, stop + _ROOM, self._serial, slots_BL, hidden_BL)

    def take(self, kv: LayerKV, columns: DenseColumns, q_BHC: Tensor) -> bool:
        """Return whether the layer's copies hold what the step reads; fills them if they can be."""
        if columns.slots_BL is None:
            return self._filled.get(kv) == columns.serial
        # Products of 16-bit numbers would round the scores; PyTorch's attention does not.
        if not kv.keys.dtype == q_BHC.dtype == torch.float32:
            return False
        blocks, block_size = kv.keys.shape[:2]
        positions = len(q_BHC) * columns.capacity
        others = sum(_bytes(*copies) for layer, copies in self._buffers.items() if layer is not kv)
        needed = positions * _bytes(kv.keys[0, 0], kv.values[0, 0])
        return 2 * positions <= blocks * block_size and others + needed <= _MOST_BYTES

    def attend(
        self,
        q_BHC: Tensor,
        k_BKC: Tensor,
        v_BKD: Tensor,
        kv: LayerKV,
        columns: DenseColumns,
        scale: float,
        softcap: float | None,
        sinks_H: Tensor | None = None,
        bias_HD: Tensor | None = None,
        further: Further | None = None,
    ) -> Tensor:
        """Attend one query per sequence to its columns, (B, H, D).

        The paged cache already holds the new keys and values. `bias_HD` and `further` are TorchBackend.attend's.
        """
        B, K, C = k_BKC.shape
        N, D = B * K, v_BKD.shape[2]
        keys_NCL, values_NLD = self._copies(kv, N, C, D, columns.capacity)
        if columns.slots_BL is None:
            keys_NCL[:, :, columns.stop - 1] = k_BKC.reshape(N, C)
            values_NLD[:, columns.stop - 1] = v_BKD.reshape(N, D)
        else:
            slots = columns.slots_BL.flatten()
            k_BLKC = kv.keys.flatten(0, 1).index_select(0, slots).view(B, -1, K, C)
            v_BLKD = kv.values.flatten(0, 1).index_select(0, slots).view(B, -1, K, D)
            keys_NCL.view(B, K, C, -1)[..., : columns.stop] = k_BLKC.permute(0, 2, 3, 1)
            values_NLD.view(B, K, -1, D)[:, :, : columns.stop] = v_BLKD.transpose(1, 2)
            self._filled[kv] = columns.serial
        seen = slice(columns.start, columns.stop)
        keys_NCL, values_NLD, mask_N1L = keys_NCL[:, :, seen], values_NLD[:, seen], None
        if columns.hidden_BL is not None:
            if columns.mask_N1L is None:
                mask_BL = torch.zeros(columns.hidden_BL.shape).masked_fill_(columns.hidden_BL, float("-inf"))
                columns.mask_N1L = mask_BL.repeat_interleave(K, dim=0).unsqueeze(1)
            mask_N1L = columns.mask_N1L[:, :, seen]
        q_NGC = q_BHC.reshape(N, -1, C)
        if softcap is not None:
            scores_NGL = softcap * torch.tanh(torch.bmm(q_NGC, keys_NCL) * (scale / softcap))
            scores_NGL = scores_NGL if mask_N1L is None else scores_NGL + mask_N1L
        elif mask_N1L is not None:
            scores_NGL = torch.baddbmm(mask_N1L, q_NGC, keys_NCL, alpha=scale)
        else:
            scores_NGL = torch.bmm(q_NGC * scale, keys_NCL)
        if bias_HD is not None:
            # Columns are aligned at their newest token, so distances are the same in all rows.
            back_L = torch.arange(columns.stop - columns.start - 1, -1, -1).clamp_(max=bias_HD.shape[1] - 1)
            scores_NGL.view(B, -1, len(back_L)).add_(bias_HD[:, back_L])
        out_NGD = torch.bmm(torch.softmax(scores_NGL, dim=-1), values_NLD)
        if sinks_H is not None:
            out_NGD *= left_by_sinks(scores_NGL, sinks_H.view(K, -1).repeat(B, 1))
        if further is not None:
            out_NGD = joined(out_NGD, scores_NGL, further.sums_TH, further.values_THC)
        return out_NGD.view(B, -1, D)

    def _copies(self, kv: LayerKV, N: int, C: int, D: int, capacity: int) -> tuple[Tensor, Tensor]:
        """Return the layer's copies, keys (N, C, capacity) and values (N, capacity, D), allocated once."""
        keys, values = self._buffers.get(kv, (kv.keys.new_empty(0), kv.values.new_empty(0)))
        if keys.numel() < N * C * capacity or values.numel() < N * D * capacity:
            keys, values = keys.new_empty(N * C * capacity), values.new_empty(N * D * capacity)
            self._buffers[kv] = keys, values
        return (
            keys[: N * C * capacity].view(N, C, capacity),
            values[: N * D * capacity].view(N, capacity, D),
        )


def _bytes(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def left_by_sinks(scores_L: Tensor, sinks: Tensor) -> Tensor:
    """Return the share of the softmax (..., 1) that scores (..., L) keep from sinks (...)."""
    return torch.sigmoid(torch.logsumexp(scores_L, dim=-1) - sinks.float()).unsqueeze(-1)


def joined(out_C: Tensor, scores_L: Tensor, sums: Tensor, values_C: Tensor) -> Tensor:
    """Return what one softmax over two sets of scores makes: outputs (..., C) by scores (..., L), and Further's set.

    The sums and values of that have the same elements as (...) and (..., C), in the same order.
    """
    left = left_by_sinks(scores_L, sums.reshape(scores_L.shape[:-1]))
    return out_C * left + values_C.reshape(out_C.shape) * (1 - left)
