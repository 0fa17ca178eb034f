"""One persistent row per sequence: its tokens, its positions, its block tables."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from beheld.core.params import Sampling
from beheld.core.plan import Admission, SeqSlice, SpanView
from beheld.models.adapter import ModelAdapter


@dataclass(eq=False)
class Row:
    """What the device side keeps of one sequence.

    Attributes:
        token_ids: the tokens known when it was admitted, int64.
        positions_XN: their rotary positions.
        delta: what to add to an index beyond them to get its position.
    """

    token_ids: np.ndarray
    num_prompt: int
    positions_XN: np.ndarray
    delta: int
    spans: tuple[SpanView, ...]
    params: Sampling


class Rows:
    """All rows. Tokens sampled after admission stay on the device: `last_token_R` holds each row's newest."""

    def __init__(self, adapter: ModelAdapter, num_rows: int, num_groups: int, blocks_per_row: int) -> None:
        self._adapter = adapter
        self._rows: list[Row | None] = [None] * num_rows
        self.last_token_R = torch.zeros(num_rows, dtype=torch.int64, device=adapter.device)
        self.tables_GRN = np.zeros((num_groups, num_rows, blocks_per_row), dtype=np.int32)

    def __getitem__(self, row: int) -> Row:
        state = self._rows[row]
        assert state is not None, f"row {row} holds no sequence"
        return state

    def release(self, row: int) -> None:
        """The row is free."""
        self._rows[row] = None

    def admit(self, admission: Admission) -> None:
        """Fill a row; filling it again with the same sequence changes nothing."""
        positions_XN, delta = self._adapter.positions(admission.token_ids[: admission.num_prompt], admission.spans)
        extra = len(admission.token_ids) - admission.num_prompt
        if extra:
            tail = np.arange(admission.num_prompt, len(admission.token_ids)) + delta
            positions_XN = np.concatenate([positions_XN, np.broadcast_to(tail, (len(positions_XN), extra))], axis=1)
        for group, blocks in enumerate(admission.blocks):
            self.tables_GRN[group, admission.row, : len(blocks)] = blocks
        self._rows[admission.row] = Row(
            token_ids=np.array(admission.token_ids, dtype=np.int64),
            num_prompt=admission.num_prompt,
            positions_XN=positions_XN,
            delta=delta,
            spans=admission.spans,
            params=admission.params,
        )

    def append_blocks(self, piece: SeqSlice, block_size: int) -> None:
        """Extend the row's block tables by the slice's new blocks; they are the last ones up to `stop`.

        Where they go follows from the slice alone, so that a step may be launched again after it failed.
        """
        after = -(-piece.stop // block_size)
        for group, blocks in enumerate(piece.new_blocks):
            if blocks:
                self.tables_GRN[group, piece.row, after - len(blocks) : after] = blocks
