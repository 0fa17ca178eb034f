"""A plan and the rows it speaks of, as flat tensors.

Shapes: T tokens, B sequences, S wanted logits, X position axes, N blocks of a table, P tokens that will be sampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from beheld.attention.backend import AttnMetadata
from beheld.core.config import ModelInfo
from beheld.core.plan import SeqSlice, SpanView
from beheld.core.pooling_params import Pooling
from beheld.runner.cache.cache import DeviceCaches
from beheld.runner.rows import Rows
from beheld.runner.staging import to_device


class PromptTarget(NamedTuple):
    """What is reported of a slice of a prompt.

    Attributes:
        row: the row.
        start: the first position whose next token is reported on.
        part: the places of these positions among the wanted.
        ids: the tokens that follow them.
    """

    row: int
    start: int
    part: slice
    ids: np.ndarray


@dataclass(eq=False)
class Layout:
    """One step's numbers, on the host.

    Attributes:
        slices: the plan's slices in the order of the batch: those of one token first.
        counts: tokens of each slice.
        first_token: where each slice's tokens start in the batch.
        arrays: by name what the device needs, see `_tokens` and `_positions`; "wanted": the places of the tokens whose
            logits are wanted; "sampled": where in Rows.newest_P the sampled token of each slice will stand, were there
            no drafts.
        sampling: slices that sample, in order. The first of the wanted tokens are theirs: the last `SeqSlice.wanted`
            of each.
        lora_slots_T: the slot of each token's LoRA adapter (0: none).
        prompt_targets: of slices that report prompt log-probabilities.
        both_ways: see AttnMetadata.
    """

    slices: list[SeqSlice]
    counts: list[int]
    first_token: list[int]
    arrays: dict[str, np.ndarray]
    sampling: list[SeqSlice]
    lora_slots_T: np.ndarray
    prompt_targets: list[PromptTarget]
    both_ways: tuple[tuple[tuple[int, int], ...], ...]

    @property
    def drafts(self) -> bool:
        """True if some slice checks draft tokens."""
        return any(piece.token_ids for piece in self.sampling)

    @property
    def num_decodes(self) -> int:
        """Slices of one token."""
        return sum(count == 1 for count in self.counts)


@dataclass(eq=False)
class Batch:
    """One step's tensors.

    Attributes:
        slices, first_token, sampling, lora_slots_T, prompt_targets: see Layout.
        ids_T: token ids (0 where an embedding will be merged in).
        positions_XT: rotary positions.
        metadata: for attention.
        wanted_S: batch indices of the tokens whose logits are wanted.
        sampled_P: where in Rows.newest_P the sampled tokens will stand, on the device.
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
    prompt_targets: list[PromptTarget]

    @property
    def num_sampled(self) -> int:
        """How many of the wanted tokens are those of slices that sample."""
        return sum(piece.wanted for piece in self.sampling)


def lay_out(slices: Sequence[SeqSlice], rows: Rows, info: ModelInfo, block_size: int) -> Layout:
    """Flatten the slices; see Layout."""
    decoding = _lay_out_decodes(slices, rows, info, block_size)
    return _lay_out_any(slices, rows, info, block_size) if decoding is None else decoding


def _lay_out_decodes(slices: Sequence[SeqSlice], rows: Rows, info: ModelInfo, block_size: int) -> Layout | None:
    """The layout of a step whose slices each sample one token after one that only the device knows.

    Most steps are of this form. `_lay_out_any` gives the same for them in three times as long. None for other steps.
    """
    for piece in slices:
        if piece.stop - piece.start != 1 or piece.wanted != 1 or piece.token_ids:
            return None
    row_B = np.array([piece.row for piece in slices], dtype=np.int64)
    starts_B = np.array([piece.start for piece in slices], dtype=np.int64)
    if (starts_B < rows.known_R[row_B]).any():
        return None
    count = len(slices)
    places_B, lengths_B = np.arange(count), starts_B + 1
    positions_XB = np.empty((rows[slices[0].row].positions_XN.shape[0], count), dtype=np.int64)
    positions_XB[:] = rows.position_of(starts_B, rows.delta_R[row_B])
    arrays = {
        "ids": np.zeros(count, dtype=np.int64),
        "positions": positions_XB,
        "places": places_B,
        "sources": rows.newest_places(row_B, starts_B),
        "lengths": lengths_B.astype(np.int32),
        "bounds": np.arange(count + 1, dtype=np.int32),
    }
    widest = -(-int(lengths_B.max()) // block_size)
    block_B, offset_B = np.divmod(starts_B, block_size)
    for index in range(len(info.paged_groups)):
        tables = rows.tables_GRN[index, row_B, :widest]
        arrays[f"slots {index}"] = tables[places_B, block_B].astype(np.int64) * block_size + offset_B
        arrays[f"tables {index}"] = tables
    arrays["wanted"] = places_B
    arrays["sampled"] = rows.newest_places(row_B, lengths_B)
    # No prompt is reported or read both ways.
    order = list(slices)
    return Layout(order, [1] * count, list(range(count)), arrays, order, rows.lora_slots_R[row_B], [], ())


def _lay_out_any(slices: Sequence[SeqSlice], rows: Rows, info: ModelInfo, block_size: int) -> Layout:
    """The layout of any step."""
    ordered = sorted(slices, key=lambda s: s.stop - s.start > 1)
    counts = [s.stop - s.start for s in ordered]
    stops = np.cumsum(counts).tolist()
    first_token = [stop - count for stop, count in zip(stops, counts, strict=True)]
    sampling = [s for s in ordered if s.wanted]
    wanted = _wanted([s.wanted for s in ordered], stops)
    targets: list[PromptTarget] = []
    if info.pooler is None:
        reported: list[int] = []
        for piece, first in zip(ordered, first_token, strict=True):
            _want_prompt(piece, first, rows, len(wanted), reported, targets)
        if reported:
            wanted = np.concatenate([wanted, np.array(reported, dtype=np.int64)])
    arrays = {
        **_tokens(ordered, first_token, stops[-1], rows),
        **_positions(ordered, counts, rows, info, block_size),
        "wanted": wanted,
        "sampled": rows.newest_places([s.row for s in sampling], [s.stop for s in sampling]),
    }
    lora_slots_T = np.repeat(rows.lora_slots_R[[s.row for s in ordered]], counts)
    both_ways = _both_ways(ordered, rows, info)
    return Layout(ordered, counts, first_token, arrays, sampling, lora_slots_T, targets, both_ways)


def build(laid: Layout, rows: Rows, caches: DeviceCaches, block_size: int) -> Batch:
    """Take a step's numbers to the device."""
    made = to_device(laid.arrays, rows.newest_P.device)
    ids_T, unknown = made["ids"], laid.arrays["places"].size
    # A token sampled since admission is not known on the host.
    if unknown == len(ids_T):
        ids_T = rows.newest_P.index_select(0, made["sources"])
    elif unknown:
        ids_T.index_copy_(0, made["places"], rows.newest_P.index_select(0, made["sources"]))
    return Batch(
        slices=laid.slices,
        first_token=laid.first_token,
        ids_T=ids_T,
        positions_XT=made["positions"],
        metadata=_metadata(laid, rows, caches, block_size, made),
        wanted_S=made["wanted"],
        sampling=laid.sampling,
        sampled_P=made["sampled"],
        lora_slots_T=laid.lora_slots_T,
        prompt_targets=laid.prompt_targets,
    )


def _wanted(counts: list[int], stops: list[int]) -> np.ndarray:
    """The places of each slice's last `counts` tokens, int64; `stops` are where the slices' tokens end."""
    ends = np.cumsum(counts)
    return np.arange(int(ends[-1]), dtype=np.int64) + np.repeat(np.array(stops, dtype=np.int64) - ends, counts)


def _want_prompt(
    piece: SeqSlice,
    first: int,
    rows: Rows,
    num_before: int,
    wanted: list[int],
    targets: list[PromptTarget],
) -> None:
    """The logits at position p are those of the prompt's token at p + 1; `num_before` others are wanted before them."""
    row = rows[piece.row]
    last = min(piece.stop, row.num_prompt - 1)
    since = None if isinstance(row.params, Pooling) else row.params.reports_from
    if since is None or (begin := max(piece.start, since)) >= last:
        return
    part = slice(num_before + len(wanted), num_before + len(wanted) + last - begin)
    wanted.extend(range(first + begin - piece.start, first + last - piece.start))
    targets.append(PromptTarget(piece.row, begin, part, row.token_ids[begin + 1 : last + 1]))


def _tokens(slices: list[SeqSlice], first_token: list[int], total: int, rows: Rows) -> dict[str, np.ndarray]:
    """Ids and positions. Of tokens sampled since admission, which the host does not know: their places in the batch,
    and where in Rows.newest_P they stand (sources). Draft tokens and the one before them come with their slice.
    """
    row_index = np.array([s.row for s in slices])
    starts = np.array([s.start for s in slices])
    sampled = starts >= rows.known_R[row_index]
    if not sampled.any():
        own = [rows[s.row] for s in slices]
        known = rows.known_R[row_index].tolist()
        whole = [s.start == 0 and s.stop == count for s, count in zip(slices, known, strict=True)]
        ids = np.concatenate(
            [
                row.token_ids if all_of_it else row.token_ids[s.start : s.stop]
                for row, s, all_of_it in zip(own, slices, whole, strict=True)
            ]
        )
        parts = [
            row.positions_XN if all_of_it else row.positions_XN[:, s.start : s.stop]
            for row, s, all_of_it in zip(own, slices, whole, strict=True)
        ]
        for row, piece, first in zip(own, slices, first_token, strict=True):
            if row.spans:
                _blank_embeds(ids, first, piece, rows)
        none = np.zeros(0, dtype=np.int64)
        positions = np.concatenate(parts, axis=1).astype(np.int64, copy=False)
        return {"ids": ids, "positions": positions, "places": none, "sources": none}
    axes = rows[slices[0].row].positions_XN.shape[0]
    ids = np.zeros(total, dtype=np.int64)
    positions = np.zeros((axes, total), dtype=np.int64)
    for index in np.flatnonzero(~sampled).tolist():
        piece, first = slices[index], first_token[index]
        row = rows[piece.row]
        place = slice(first, first + piece.stop - piece.start)
        ids[place] = row.token_ids[piece.start : piece.stop]
        positions[:, place] = row.positions_XN[:, piece.start : piece.stop]
        _blank_embeds(ids, first, piece, rows)
    for index in np.flatnonzero(sampled).tolist():
        piece, first = slices[index], first_token[index]
        if piece.token_ids:
            place = slice(first, first + len(piece.token_ids))
            ids[place] = piece.token_ids
            positions[:, place] = rows.position_of(np.arange(piece.start, piece.stop), rows.delta_R[piece.row])
            sampled[index] = False
        assert piece.stop - piece.start == (len(piece.token_ids) or 1), "the device knows one sampled token"
    places, row_index, starts = np.array(first_token)[sampled], row_index[sampled], starts[sampled]
    positions[:, places] = rows.position_of(starts, rows.delta_R[row_index])
    return {
        "ids": ids,
        "positions": positions,
        "places": places.astype(np.int64),
        "sources": rows.newest_places(row_index, starts),
    }


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

    Audio is read forwards in every family.
    """
    where = info.both_ways
    if where == "nowhere":
        return ()
    if where == "prompt":
        lengths = [rows[piece.row].num_prompt for piece in slices]
        whole = [piece.start == 0 and length <= piece.stop for piece, length in zip(slices, lengths, strict=True)]
        found = tuple([((0, length),) if seen else () for length, seen in zip(lengths, whole, strict=True)])
        return found if any(whole) else ()
    made = []
    for piece in slices:
        row = rows[piece.row]
        if piece.start >= row.num_prompt:
            # An answer is read forwards, and a prompt is not looked through again for each of its tokens.
            ranges: list[tuple[int, int]] = []
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


def _positions(
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
    laid: Layout, rows: Rows, caches: DeviceCaches, block_size: int, made: Mapping[str, Tensor]
) -> AttnMetadata:
    """The layout as attention knows it, from what `_positions` gave once it is on the device."""
    slots, tables = ([made[f"{name} {index}"] for index in range(len(caches.tables))] for name in ("slots", "tables"))
    return AttnMetadata(
        num_decodes=laid.num_decodes,
        starts=tuple(s.start for s in laid.slices),
        lengths=tuple(s.stop for s in laid.slices),
        lengths_B=made["lengths"],
        cu_q_B1=made["bounds"],
        groups=caches.metadata(slots, tables),
        block_size=block_size,
        both_ways=laid.both_ways,
        sequences=tuple(rows[s.row].serial for s in laid.slices),
        tables=tuple(laid.arrays[f"tables {index}"] for index in range(len(caches.tables))),
    )
