"""A plan and the rows it speaks of, as flat tensors.

Shapes: T tokens, B sequences, S wanted logits, X position axes, N blocks of a table, P tokens sampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from beheld.attention.backend import AttnMetadata, GroupMetadata
from beheld.core.config import KVGroup, ModelInfo
from beheld.core.plan import SeqSlice, SpanView
from beheld.runner.rows import Rows
from beheld.runner.staging import to_device


@dataclass(eq=False)
class Batch:
    """One step's tensors.

    Attributes:
        slices: the plan's slices in the order of the batch: those of one token first.
        first_token: where each slice's tokens start in the batch.
        ids_T: token ids (0 where an embedding will be merged in).
        positions_XT: rotary positions.
        metadata: for attention.
        wanted_S: batch indices of the tokens whose logits are wanted.
        sampling: slices that sample, in order; the first len(sampling) of wanted_S are theirs.
        sampled_P: where in Rows.newest_P their tokens will stand, on the device.
        lora_slots_T: the slot of each token's LoRA adapter (0: none), on the host.
        prompt_targets: of slices that report prompt log-probabilities: (slice, its part of wanted_S, ids predicted).
    """

    slices: list[SeqSlice]
    first_token: list[int]
    ids_T: Tensor
    positions_XT: Tensor
    metadata: AttnMetadata
    wanted_S: Tensor
    sampling: list[SeqSlice]
    sampled_P: Tensor
    lora_slots_T: np.ndarray
    prompt_targets: list[tuple[SeqSlice, slice, np.ndarray]]


def build(slices: Sequence[SeqSlice], rows: Rows, info: ModelInfo, block_size: int) -> Batch:
    """Flatten the slices; see Batch."""
    ordered = sorted(slices, key=lambda s: s.stop - s.start > 1)
    counts = [s.stop - s.start for s in ordered]
    stops = np.cumsum(counts)
    first_token = [int(stop) - count for stop, count in zip(stops, counts, strict=True)]
    sampling = [s for s in ordered if s.samples]
    wanted = [int(stop) - 1 for s, stop in zip(ordered, stops, strict=True) if s.samples]
    targets: list[tuple[SeqSlice, slice, np.ndarray]] = []
    for piece, first in zip(ordered, first_token, strict=True):
        _want_prompt(piece, first, rows, wanted, targets)
    arrays = {
        **_tokens(ordered, first_token, int(stops[-1]), rows),
        **_layout(ordered, counts, rows, info, block_size),
        "wanted": np.array(wanted, dtype=np.int64),
        "sampled": rows.newest_places([s.row for s in sampling], [s.stop for s in sampling]),
    }
    made = to_device(arrays, rows.newest_P.device)
    ids_T = made["ids"]
    if arrays["places"].shape[1]:
        # A token sampled since admission is not known on the host.
        places, sources = made["places"]
        ids_T.index_copy_(0, places, rows.newest_P.index_select(0, sources))
    return Batch(
        slices=ordered,
        first_token=first_token,
        ids_T=ids_T,
        positions_XT=made["positions"],
        metadata=_metadata(ordered, counts, rows, info, block_size, made),
        wanted_S=made["wanted"],
        sampling=sampling,
        sampled_P=made["sampled"],
        lora_slots_T=np.repeat(rows.lora_slots_R[[s.row for s in ordered]], counts),
        prompt_targets=targets,
    )


def _want_prompt(
    piece: SeqSlice, first: int, rows: Rows, wanted: list[int], targets: list[tuple[SeqSlice, slice, np.ndarray]]
) -> None:
    """The logits at position p judge the prompt's token at p + 1."""
    row = rows[piece.row]
    last = min(piece.stop, row.num_prompt - 1)
    if row.params.prompt_logprobs is None or piece.start >= last:
        return
    part = slice(len(wanted), len(wanted) + last - piece.start)
    wanted.extend(range(first, first + last - piece.start))
    targets.append((piece, part, row.token_ids[piece.start + 1 : last + 1]))


def _tokens(slices: list[SeqSlice], first_token: list[int], total: int, rows: Rows) -> dict[str, np.ndarray]:
    """Ids and positions; and where tokens sampled since admission go, with where in Rows.newest_P they stand."""
    axes = rows[slices[0].row].positions_XN.shape[0]
    ids = np.zeros(total, dtype=np.int64)
    positions = np.zeros((axes, total), dtype=np.int64)
    on_device: list[int] = []
    sampled: list[SeqSlice] = []
    for piece, first in zip(slices, first_token, strict=True):
        row = rows[piece.row]
        if piece.start >= len(row.token_ids):
            assert piece.stop == piece.start + 1, "only one sampled token is known at a time"
            positions[:, first] = rows.position_of(piece.start, row.delta)
            on_device.append(first)
            sampled.append(piece)
        else:
            place = slice(first, first + piece.stop - piece.start)
            ids[place] = row.token_ids[piece.start : piece.stop]
            positions[:, place] = row.positions_XN[:, piece.start : piece.stop]
            _blank_embeds(ids, first, piece, rows)
    sources = rows.newest_places([s.row for s in sampled], [s.start for s in sampled])
    return {"ids": ids, "positions": positions, "places": np.stack([np.array(on_device, dtype=np.int64), sources])}


def _blank_embeds(ids: np.ndarray, first: int, piece: SeqSlice, rows: Rows) -> None:
    """Placeholder ids may lie outside the embedding table; their rows are overwritten, so any id does."""
    for span in rows[piece.row].spans:
        low, high = max(piece.start, span.start), min(piece.stop, span.stop)
        if low < high:
            part = ids[first + low - piece.start : first + high - piece.start]
            if span.embed_mask is None:
                part[:] = 0
            else:
                part[np.array(span.embed_mask[low - span.start : high - span.start])] = 0


def _both_ways(slices: list[SeqSlice], rows: Rows, info: ModelInfo) -> tuple[tuple[tuple[int, int], ...], ...]:
    """For each slice, the ranges of its positions that are read both ways; nothing if there are none at all.

    Sound is read forwards in every family.
    """
    where = info.both_ways
    if where == "nowhere":
        return ()
    made = []
    for piece in slices:
        row = rows[piece.row]
        if piece.start >= row.num_prompt:
            # An answer is read forwards, and a prompt is not looked through again for each of its tokens.
            ranges: list[tuple[int, int]] = []
        elif where == "prompt":
            ranges = [(0, row.num_prompt)]
        elif where == "joint":
            ranges = _stretches(np.isin(row.token_ids[: row.num_prompt], list(info.joint_ids)))
        else:
            ranges = [run for span in row.spans if span.modality != "audio" for run in _runs(span)]
        made.append(tuple((low, high) for low, high in ranges if piece.start <= low and high <= piece.stop))
    return tuple(made) if any(made) else ()


def _runs(span: SpanView) -> list[tuple[int, int]]:
    """The ranges of positions of a span that take embeddings without a gap."""
    if span.embed_mask is None:
        return [(span.start, span.stop)]
    return [(low + span.start, high + span.start) for low, high in _stretches(np.array(span.embed_mask))]


def _stretches(mask_N: np.ndarray) -> list[tuple[int, int]]:
    """Where a mask is true without a gap (start, stop)."""
    edges = np.flatnonzero(np.diff(mask_N.astype(np.int8), prepend=0, append=0))
    return [(int(low), int(high)) for low, high in edges.reshape(-1, 2)]


def _ahead(where: str, group: KVGroup) -> str:
    """How the group's layers look ahead; see GroupMetadata."""
    if where == "joint":
        return "joint"
    return "never" if where == "windowed media" and group.window is None else "ranges"


def _layout(
    slices: list[SeqSlice], counts: list[int], rows: Rows, info: ModelInfo, block_size: int
) -> dict[str, np.ndarray]:
    """What attention reads on the device: lengths, bounds of the sequences' tokens, each group's slots and tables."""
    row_index = np.array([s.row for s in slices])
    starts = np.array([s.start for s in slices])
    lengths = np.array([s.stop for s in slices])
    widest = -(-int(lengths.max()) // block_size)
    # Position and sequence of every token: sequence b's tokens stand at starts[b], starts[b] + 1, ...
    sequence_T = np.repeat(np.arange(len(slices)), counts)
    offset_T = np.arange(len(sequence_T)) - np.repeat(np.cumsum(counts) - counts, counts)
    position_T = starts[sequence_T] + offset_T
    made = {
        "lengths": lengths.astype(np.int32),
        "bounds": np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
    }
    for index in range(len(info.paged_groups)):
        tables = rows.tables_GRN[index, row_index, :widest]
        slots = tables[sequence_T, position_T // block_size].astype(np.int64) * block_size + position_T % block_size
        made |= {f"slots {index}": slots, f"tables {index}": tables}
    return made


def _metadata(
    slices: list[SeqSlice],
    counts: list[int],
    rows: Rows,
    info: ModelInfo,
    block_size: int,
    made: Mapping[str, Tensor],
) -> AttnMetadata:
    """The layout as attention knows it, from what `_layout` gave once it is on the device."""
    groups = tuple(
        GroupMetadata(
            slots_T=made[f"slots {index}"],
            tables_BN=made[f"tables {index}"],
            window=group.window,
            chunk=group.chunk,
            ahead=_ahead(info.both_ways, group),
        )
        for index, group in enumerate(info.paged_groups)
    )
    return AttnMetadata(
        num_decodes=sum(count == 1 for count in counts),
        starts=tuple(s.start for s in slices),
        lengths=tuple(s.stop for s in slices),
        lengths_B=made["lengths"],
        cu_q_B1=made["bounds"],
        groups=groups,
        block_size=block_size,
        both_ways=_both_ways(slices, rows, info),
        sequences=tuple(rows[s.row].serial for s in slices),
    )
