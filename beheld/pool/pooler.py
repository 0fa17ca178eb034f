"""The pooler: from the hidden states of a step's slices to the vectors and scores of prompts that are complete.

Shapes: S states that a step gives, N positions of a slice, M states of complete prompts, H hidden size, D numbers of
a vector, or classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from beheld.core.params import Pooling
from beheld.core.plan import SeqSlice
from beheld.core.pooling import PoolerInfo
from beheld.platform.host_copy import copied
from beheld.pool.methods import METHODS


@dataclass(eq=False)
class PoolingRow:
    """A prompt that is being pooled.

    Attributes:
        parts: what its slices gave, by their first position: a step that is launched again gives the same once more.
    """

    params: Pooling
    token_ids: Sequence[int]
    parts: dict[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class PooledValues:
    """The values of complete prompts with the same parameters: on the device, or on the host after `start_copy`.

    Attributes:
        values_MD: float32, of one prompt after another.
        rows: the prompts' rows.
        counts: how many of the M each has; None where the one stands for the whole prompt.
    """

    values_MD: Tensor
    rows: Sequence[int]
    counts: Sequence[int | None]

    def start_copy(self) -> PooledValues:
        """A copy in host memory that nothing else uses, complete once all work launched so far is done."""
        return PooledValues(copied(self.values_MD), self.rows, self.counts)

    def to_host(self) -> dict[int, np.ndarray]:
        """Row -> its vector or scores (D), or those of each position (N, D)."""
        parts = self.values_MD.split([1 if count is None else count for count in self.counts])
        both = zip(self.rows, self.counts, parts, strict=True)
        return {row: (part[0] if count is None else part).numpy() for row, count, part in both}


class Pooler:
    """Pools the rows of one device.

    Args:
        info: how the model pools.
        head: makes vectors or scores (M, D) of pooled states (M, H).
    """

    def __init__(self, info: PoolerInfo, head: Callable[[Tensor], Tensor]) -> None:
        self._info = info
        self._head = head
        self._rows: dict[int, PoolingRow] = {}

    def admit(self, row: int, params: Pooling, token_ids: Sequence[int]) -> None:
        """Start a prompt in a row; repeating it changes nothing."""
        self._rows[row] = PoolingRow(params, token_ids)

    def release(self, row: int) -> None:
        """Forget a row."""
        self._rows.pop(row, None)

    def pool(self, slices: Sequence[SeqSlice], hidden_SH: Tensor) -> list[PooledValues]:
        """Take in what slices give; return the values of the prompts that are complete.

        Args:
            slices: those that give states, in the order of `hidden_SH`; each gives as many as are `wanted`.
        """
        states_by_row: dict[int, Tensor] = {}
        for piece, hidden_NH in zip(slices, hidden_SH.split([piece.wanted for piece in slices]), strict=True):
            row = self._rows[piece.row]
            method, start = METHODS[row.params.method], piece.stop - piece.wanted
            part, last = method.part(hidden_NH, start), piece.stop == len(row.token_ids)
            if part is not None:
                # Without a copy, it would keep the states of the whole step.
                row.parts[start] = part if last else part.clone()
            if last:
                parts = [row.parts[first] for first in sorted(row.parts)]
                states_by_row[piece.row] = method.joined(parts, row.token_ids, row.params)
        alike: dict[tuple[object, ...], list[int]] = {}
        for number in states_by_row:
            params = self._rows[number].params
            alike.setdefault((params.task, params.activate, params.dimensions, params.returned_ids), []).append(number)
        return [self._values({row: states_by_row[row] for row in rows}, hidden_SH.dtype) for rows in alike.values()]

    def _values(self, states_by_row: Mapping[int, Tensor], dtype: torch.dtype) -> PooledValues:
        """Return the values of prompts with the same parameters."""
        params = self._rows[next(iter(states_by_row))].params
        raw_MD = self._head(torch.cat(tuple(states_by_row.values())).to(dtype)).float()
        whole = params.task in ("embed", "classify")
        counts = [None if whole else len(states_MH) for states_MH in states_by_row.values()]
        return PooledValues(self._finished(raw_MD, params), list(states_by_row), counts)

    def _finished(self, raw_MD: Tensor, params: Pooling) -> Tensor:
        info = self._info
        if params.task in ("embed", "token_embed"):
            vectors_MD = raw_MD if params.dimensions is None else raw_MD[:, : params.dimensions]
            return F.normalize(vectors_MD, dim=-1) if params.activate else vectors_MD
        scores_MD = (raw_MD - info.logit_mean) / info.logit_sigma
        if params.activate:
            scores_MD = _ACTIVATIONS[info.activation](scores_MD)
        return scores_MD[:, list(params.returned_ids)] if params.returned_ids else scores_MD


_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda scores_MD: scores_MD,
    "sigmoid": torch.sigmoid,
    "softmax": lambda scores_MD: scores_MD.softmax(-1),
}
