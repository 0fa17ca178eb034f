"""One persistent row per sequence: its tokens, its positions, its block tables.

Shapes: R rows, G KV groups, N blocks of a table, X position axes, P places of newest tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from beheld.attention.cross import CrossView
from beheld.core.plan import Admission, SeqSlice, SpanView
from beheld.core.pooling_params import Pooling
from beheld.core.request import LoRARequest
from beheld.core.sampling import Sampling
from beheld.models.adapter import ModelAdapter


class LastView(NamedTuple):
    """What a sequence's positions from `start` on attend to: all of them the same.

    Attributes:
        seen: the spans, and how many of the first states of each.
        shown: whether these are shown to them, or attended to because none is.
    """

    start: int
    seen: tuple[tuple[SpanView, int], ...]
    shown: bool


@dataclass(slots=True, eq=False)
class Row:
    """What the device side keeps of one sequence.

    Attributes:
        token_ids: the tokens known when it was admitted, int64.
        positions_XN: their rotary positions.
        delta: what to add to an index beyond them to get its position.
        serial: a number that no other admission to any row has.
        cross_views: for each of its spans, which positions attend to its states; empty if the model has no states.
        last_view: what its last positions attend to, once the runner has computed it (runner/cross_inputs.py).
    """

    token_ids: np.ndarray
    num_prompt: int
    positions_XN: np.ndarray
    delta: int
    spans: tuple[SpanView, ...]
    params: Sampling | Pooling
    serial: int
    cross_views: tuple[CrossView, ...] = ()
    last_view: LastView | None = None


class Rows:
    """All rows. Tokens sampled after admission stay on the device: `newest_P` holds each row's two newest.

    Attributes:
        newest_P: int64, on the device; `newest_places` says where the token at a position stands.
        tables_GRN: block tables on the host.
        num_admitted: admissions since the start.
        known_R, delta_R, media_stop_R, lora_slots_R: of each row, the number of tokens known on the host, Row.delta,
            where its last media span ends, and the slot of its LoRA adapter (0: none); on the host.
    """

    def __init__(self, adapter: ModelAdapter, num_rows: int, num_groups: int, blocks_per_row: int) -> None:
        self._adapter = adapter
        self._rows: list[Row | None] = [None] * num_rows
        self.num_admitted = 0
        self.newest_P = torch.zeros(2 * num_rows, dtype=torch.int64, device=adapter.device)
        self.tables_GRN = np.zeros((num_groups, num_rows, blocks_per_row), dtype=np.int32)
        self.known_R = np.zeros(num_rows, dtype=np.int64)
        self.delta_R = np.zeros(num_rows, dtype=np.int64)
        self.media_stop_R = np.zeros(num_rows, dtype=np.int64)
        self.lora_slots_R = np.zeros(num_rows, dtype=np.int64)
        # By (group, row), where its table was written since changes were last forgotten: from `low` up to `high`.
        self._changed: dict[tuple[int, int], tuple[int, int]] = {}

    def position_of(self, index: Any, delta: Any) -> Any:
        """The rotary position of a token that was sampled, by its index in the sequence; of many as well."""
        return index * self._adapter.position_unit + delta

    def __getitem__(self, row: int) -> Row:
        state = self._rows[row]
        assert state is not None, f"row {row} holds no sequence"
        return state

    def newest_places(self, rows: ArrayLike, positions: ArrayLike) -> np.ndarray:
        """Where in `newest_P` the tokens of `rows` at `positions` stand, int64.

        Even positions and odd ones have places of their own, so that a step does not overwrite the token it computes,
        and may be launched again after its result was written:

            newest_P    row 0 | row 1 | .. | row 0 | row 1 | ..
                        even positions       odd positions
        """
        return np.asarray(rows, dtype=np.int64) + np.asarray(positions, dtype=np.int64) % 2 * len(self._rows)

    def keep_newest(self, rows_B: Tensor, positions_B: Tensor, ids_B: Tensor) -> None:
        """Keep the tokens of rows at positions that only the device knows, where `newest_places` will look for them."""
        self.newest_P.index_copy_(0, self.places_of(rows_B, positions_B), ids_B)

    def places_of(self, rows_B: Tensor, positions_B: Tensor) -> Tensor:
        """`newest_places` of what only the device knows."""
        return rows_B + positions_B % 2 * len(self._rows)

    def release(self, row: int) -> None:
        """The row is free."""
        self._rows[row] = None
        self._take_slot(row, None)

    def _take_slot(self, row: int, lora: LoRARequest | None) -> None:
        slots = self._adapter.lora
        assert slots is not None or lora is None, "an adapter for a model without slots"
        if slots is not None:
            self.lora_slots_R[row] = slots.acquire(row, lora)

    def admit(self, admission: Admission) -> None:
        """Fill a row; filling it again with the same sequence changes nothing.

        Raises:
            LoRAError: its adapter is gone.
        """
        self._take_slot(admission.row, admission.lora)
        params = admission.params
        second = params.second if isinstance(params, Pooling) else None
        prompt_ids = admission.token_ids[: admission.num_prompt]
        positions_XN, delta = self._adapter.positions(prompt_ids, admission.spans, second)
        count = len(admission.token_ids)
        extra = count - admission.num_prompt
        if extra:
            tail = self.position_of(np.arange(admission.num_prompt, count), delta)
            positions_XN = np.concatenate([positions_XN, np.broadcast_to(tail, (len(positions_XN), extra))], axis=1)
        row = admission.row
        self.num_admitted += 1
        for group, blocks in enumerate(admission.blocks):
            self._write(group, row, 0, blocks)
        self.known_R[row] = count
        self.delta_R[row] = delta
        self.media_stop_R[row] = admission.spans[-1].stop if admission.spans else 0
        self._rows[row] = Row(
            token_ids=np.array(admission.token_ids, dtype=np.int64),
            num_prompt=admission.num_prompt,
            positions_XN=positions_XN,
            delta=delta,
            spans=admission.spans,
            params=admission.params,
            serial=self.num_admitted,
            cross_views=self._adapter.cross_views(admission.spans, admission.num_prompt),
        )

    def append_blocks(self, piece: SeqSlice, block_size: int) -> None:
        """Extend the row's block tables by the slice's new blocks; they are the last ones up to `stop`.

        Where they go follows from the slice alone, so that a step may be launched again after it failed.
        """
        after = -(-piece.stop // block_size)
        for group, blocks in enumerate(piece.new_blocks):
            if blocks:
                self._write(group, piece.row, after - len(blocks), blocks)

    def _write(self, group: int, row: int, first: int, blocks: Sequence[int]) -> None:
        if not blocks:
            return
        stop = first + len(blocks)
        self.tables_GRN[group, row, first:stop] = blocks
        low, high = self._changed.get((group, row), (first, stop))
        self._changed[group, row] = (min(low, first), max(high, stop))

    def changes(self) -> np.ndarray | None:
        """What to write to a copy of the tables that was right when changes were last forgotten; None if it still is.

        Returns:
            (flat index into tables_GRN, block id) of shape (2, changes), int64. No index occurs twice, so the changes
            may be applied in any order, and there are never more than places in the tables.
        """
        if not self._changed:
            return None
        _, num_rows, width = self.tables_GRN.shape
        index = np.concatenate(
            [
                np.arange(low, high) + (group * num_rows + row) * width
                for (group, row), (low, high) in self._changed.items()
            ]
        )
        # Read now, not when they were written: a row that was admitted again since then has one value per place.
        return np.stack([index, self.tables_GRN.reshape(-1)[index]])

    def forget_changes(self) -> None:
        """The copy of the tables is right again, or there is none."""
        self._changed.clear()
