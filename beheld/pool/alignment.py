"""Alignment: from the queries of some heads of cross-attention to how strongly each token attends to each state.

The prompt is a transcript, and the item its audio; the tokens' places in time follow from the weights. Only queries are
kept while a prompt is computed in slices: weights, (N, E) of one head at a time, are made once it is complete.

The heads' weights are normalized over tokens, filtered by a median over states, and averaged, as in "Robust Speech
Recognition via Large-Scale Weak Supervision" (Whisper)'s own code for the times of words.

Shapes: T tokens of a step, N positions of a prompt that are read, E states, H query heads, K key-value heads,
C head size, W states of the median filter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from beheld.core.plan import SeqSlice
from beheld.core.pooling_params import Alignment
from beheld.pool.pooler import PooledValues

# Tokens whose weights are sorted at a time.
_SORTED = 64


@dataclass(eq=False)
class AlignedRow:
    """A prompt that is being aligned.

    Attributes:
        num_tokens: of the prompt.
        parts: by a slice's first position that is read, the queries of each layer, (n, H, C): a step that is launched
            again gives the same once more.
    """

    alignment: Alignment
    num_tokens: int
    parts: dict[int, Mapping[int, Tensor]] = field(default_factory=dict)


class Aligner:
    """Aligns the rows of one device."""

    def __init__(self) -> None:
        self._rows: dict[int, AlignedRow] = {}

    def admit(self, row: int, alignment: Alignment, num_tokens: int) -> None:
        """Start a prompt in a row; repeating it changes nothing."""
        self._rows[row] = AlignedRow(alignment, num_tokens)

    def release(self, row: int) -> None:
        """Forget a row."""
        self._rows.pop(row, None)

    def layers(self, slices: Sequence[SeqSlice]) -> set[int]:
        """Return the layers whose queries a step of these slices gives; empty if it aligns nothing."""
        rows = [self._rows[piece.row] for piece in slices if piece.row in self._rows]
        return {layer for row in rows for layer, _ in row.alignment.heads}

    def align(
        self,
        slices: Sequence[SeqSlice],
        first_token: Sequence[int],
        queries: Mapping[int, Tensor],
        keys: Callable[[int, int], Tensor],
    ) -> list[PooledValues]:
        """Take in what slices give; return the weights of the prompts that are complete.

        Args:
            slices: in the order of the batch.
            first_token: where each slice's tokens start in the batch.
            queries: layer -> queries of the step's tokens, scaled, (T, H, C).
            keys: row and layer -> keys of the row's item, (E, K, C).
        """
        found = []
        for piece, first in zip(slices, first_token, strict=True):
            row = self._rows.get(piece.row)
            if row is None:
                continue
            start = max(piece.start, row.alignment.start)
            if start < piece.stop:
                place = slice(first + start - piece.start, first + piece.stop - piece.start)
                # Without a copy, they would keep the queries of the whole step.
                row.parts[start] = {
                    layer: queries[layer][place].clone() for layer in {layer for layer, _ in row.alignment.heads}
                }
            if piece.stop == row.num_tokens:
                weights_NE = _weights(row, partial(keys, piece.row))
                found.append(PooledValues(weights_NE, (piece.row,), (len(weights_NE),)))
        return found


def _weights(row: AlignedRow, keys: Callable[[int], Tensor]) -> Tensor:
    """Return the average (N, E) of the heads' weights; `keys` gives those of a layer, (E, K, C)."""
    parts = [row.parts[start] for start in sorted(row.parts)]
    total_NE: Tensor | None = None
    for layer, head in row.alignment.heads:
        q_NHC, k_EKC = torch.cat([part[layer] for part in parts]), keys(layer)
        k_EC = k_EKC[:, head * k_EKC.shape[1] // q_NHC.shape[1]].float()
        weights_NE = torch.softmax(q_NHC[:, head] @ k_EC.T, dim=-1)[:, : row.alignment.num_states]
        filtered_NE = median(normalized(weights_NE), row.alignment.width)
        total_NE = filtered_NE if total_NE is None else total_NE + filtered_NE
    assert total_NE is not None, "an alignment without heads"
    return total_NE / len(row.alignment.heads)


def normalized(weights_NE: Tensor) -> Tensor:
    """Return weights with mean 0 and deviation 1 over the tokens of each state; 0 where they are all the same."""
    deviation_1E, mean_1E = torch.std_mean(weights_NE, dim=0, correction=0, keepdim=True)
    return (weights_NE - mean_1E) / deviation_1E.masked_fill(deviation_1E == 0, 1)


def median(weights_NE: Tensor, width: int) -> Tensor:
    """Return the median of each state and its neighbours, `width` in all, mirrored at the edges."""
    side = width // 2
    if weights_NE.shape[1] <= side:
        return weights_NE
    padded_NE = F.pad(weights_NE[None], (side, side), mode="reflect")[0]
    # Sorting takes many times the weights' own memory.
    parts = (part.unfold(1, width, 1).sort(dim=-1).values[..., side] for part in padded_NE.split(_SORTED))
    return torch.cat(list(parts))
