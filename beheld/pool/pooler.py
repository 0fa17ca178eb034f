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

from beheld.core.plan import SeqSlice
from beheld.core.pooling import PoolerInfo
from beheld.core.pooling_params import Pooling
from beheld.platform.host_copy import copied
from beheld.pool.methods import METHODS, ONE_STATE


@dataclass(slots=True, eq=False)
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
        counts: how many of the M each prompt has; None where a prompt has one for the whole of it.
    """

    values_MD: Tensor
    rows: Sequence[int]
    counts: Sequence[int | None]

    def start_copy(self) -> PooledValues:
        """A copy in host memory that nothing else uses, complete once all work launched so far is done."""
        return PooledValues(copied(self.values_MD), self.rows, self.counts)

    def to_host(self) -> dict[int, np.ndarray]:
        """Row -> its vector or scores (D), or those of each position (N, D): views of one array."""
        values_MD, found, first = self.values_MD.numpy(), {}, 0
        for row, count in zip(self.rows, self.counts, strict=True):
            found[row] = values_MD[first] if count is None else values_MD[first : first + count]
            first += 1 if count is None else count
        assert first == len(values_MD), "values of no row"
        return found

    def broken(self) -> list[int]:
        """Return the rows that have a value that is no finite number; of values on the host."""
        finite_M = np.isfinite(self.values_MD.numpy()).all(-1)
        if finite_M.all():
            return []
        counts = [1 if count is None else count for count in self.counts]
        at_fault = np.repeat(np.arange(len(counts)), counts)[~finite_M]
        return [self.rows[place] for place in np.unique(at_fault)]


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
        # Of prompts with the same parameters: their rows and states.
        alike: dict[tuple[object, ...], tuple[list[int], list[Tensor]]] = {}
        stops_B = np.cumsum([piece.wanted for piece in slices])
        starts_B = stops_B - [piece.wanted for piece in slices]
        whole, others = self._whole(slices)
        for (name, kind), places in whole.items():
            rows, states = alike.setdefault(kind, ([], []))
            rows += [slices[place].row for place in places]
            states.append(ONE_STATE[name].together(hidden_SH, starts_B[places], stops_B[places]))
        for place in others:
            piece = slices[place]
            row = self._rows[piece.row]
            method, start = METHODS[row.params.method], piece.stop - piece.wanted
            last = piece.stop == len(row.token_ids)
            part = method.part(hidden_SH[starts_B[place] : stops_B[place]], start)
            if part is not None:
                # Without a copy, it would keep the states of the whole step.
                row.parts[start] = part if last else part.clone()
            if last:
                rows, states = alike.setdefault(_kind(row.params), ([], []))
                rows.append(piece.row)
                parts = [row.parts[first] for first in sorted(row.parts)]
                states.append(method.joined(parts, row.token_ids, row.params))
        return [self._values(rows, states, hidden_SH.dtype) for rows, states in alike.values()]

    def _whole(
        self, slices: Sequence[SeqSlice]
    ) -> tuple[dict[tuple[str, tuple[object, ...]], list[int]], Sequence[int]]:
        """Return the places of the slices that hold all that their prompts' state is made of, by method and kind; and
        those of the others."""
        found: dict[tuple[str, tuple[object, ...]], list[int]] = {}
        others: list[int] = []
        # By object: prompts in a row mostly have the same one.
        known: dict[int, list[int] | None] = {}
        for place, piece in enumerate(slices):
            row = self._rows[piece.row]
            params = row.params
            number = id(params)
            if number not in known:
                one = params.method in ONE_STATE and _is_whole(params)
                known[number] = found.setdefault((params.method, _kind(params)), []) if one else None
            places = known[number]
            if (
                places is not None
                and piece.stop == len(row.token_ids)
                and (piece.stop == piece.wanted or params.method == "last")
            ):
                places.append(place)
            else:
                others.append(place)
        return {key: places for key, places in found.items() if places}, others

    def _values(self, rows: Sequence[int], states: Sequence[Tensor], dtype: torch.dtype) -> PooledValues:
        """Return the values of prompts with the same parameters; `states` are theirs in order, (M, H) each."""
        params = self._rows[rows[0]].params
        raw_MD = self._head(torch.cat(tuple(states)).to(dtype)).float()
        counts: list[int | None] = [None] * len(rows)
        if not _is_whole(params):
            counts = [len(states_MH) for states_MH in states]
        return PooledValues(self._finished(raw_MD, params), rows, counts)

    def _finished(self, raw_MD: Tensor, params: Pooling) -> Tensor:
        info = self._info
        if params.task in ("embed", "token_embed"):
            vectors_MD = raw_MD if params.dimensions is None else raw_MD[:, : params.dimensions]
            return F.normalize(vectors_MD, dim=-1) if params.activate else vectors_MD
        scores_MD = (raw_MD - info.logit_mean) / info.logit_sigma
        if params.activate:
            scores_MD = _ACTIVATIONS[info.activation](scores_MD)
        return scores_MD[:, list(params.returned_ids)] if params.returned_ids else scores_MD


def _kind(params: Pooling) -> tuple[object, ...]:
    """Return what prompts share whose values are made together."""
    return params.task, params.activate, params.dimensions, params.returned_ids


def _is_whole(params: Pooling) -> bool:
    """Return whether the values are of the whole prompt, not of its positions."""
    return params.task in ("embed", "classify")


_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda scores_MD: scores_MD,
    "sigmoid": torch.sigmoid,
    "softmax": lambda scores_MD: scores_MD.softmax(-1),
}
