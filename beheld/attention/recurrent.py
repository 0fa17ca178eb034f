"""Recurrent layers on the cache: a short causal convolution, then a state that each token reads and changes.

A block of the cache is one state. The table of a sequence says where the state after a position lies, and at which
ends of blocks a state is kept for others:

    positions   0 .. 3 | 4 .. 7 | 8 .. 11       block_size 4; a slice from 3 to 10
    table          5   |    6   |    5           reads 5 (after position 2), writes 6 (after 7), then 5 (after 9)

Shapes: T tokens of the step, B sequences, D of them decoding (one token each), C channels of the convolution, L
positions that it sees, its own last; N blocks of a table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from beheld.attention.backend import AttnMetadata, GroupMetadata, StateOf
from beheld.attention.context import ForwardContext, current
from beheld.core.errors import ModelError

# The most tokens of a prompt that a recurrence computes at once: its own tensors are many times as large as states.
_MOST_TOKENS = 1024


@dataclass(eq=False)
class LayerStates:
    """One layer's states (num_blocks, ...), float32, and the convolution's last inputs (num_blocks, L - 1, C); see
    LayerCache."""

    states: Tensor
    inputs: Tensor
    group: int

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks, the null block included."""
        return len(self.states)

    def clear(self, blocks: slice) -> None:
        """Zero these blocks."""
        self.states[blocks].zero_()
        self.inputs[blocks].zero_()


class Recurrence(Protocol):
    """How a state gives and takes."""

    def step(self, states_B: Tensor, *inputs: Tensor) -> Tensor:
        """Compute one token of each sequence, inputs (B, ...), and change the states in place; returns (B, ...)."""

    def scan(self, state: Tensor, *inputs: Tensor) -> Tensor:
        """Compute consecutive tokens of one sequence, inputs (T, ...), and change its state in place; returns
        (T, ...)."""


# Convolved tokens (T, C) of all sequences of a step -> what the recurrence takes of them, (T, ...) each.
Inputs = Callable[[Tensor], tuple[Tensor, ...]]


@dataclass(frozen=True)
class StateSlice:
    """A slice of more than one token.

    Attributes:
        first, last: its tokens in the batch.
        source: the block of the state that it continues; None at the start of a sequence.
        kept: pairs (number of the slice's tokens, block): the block that gets the state after these tokens; in order.
    """

    first: int
    last: int
    source: int | None
    kept: tuple[tuple[int, int], ...]


@dataclass(eq=False)
class _Steps:
    """What decoding sequences read and write: block indices (D), and which of them have no state yet."""

    source_D: Tensor
    target_D: Tensor
    fresh_D: Tensor


def recur(
    layer: int, x_TC: Tensor, weight_CL: Tensor, bias_C: Tensor | None, inputs: Inputs, recurrence: Recurrence
) -> Tensor:
    """Convolve x over each sequence and run the recurrence on what `inputs` makes of it; returns (T, ...).

    Raises:
        ModelError: the layer has no states, or of another shape.
    """
    context, cache = layer_states(layer, weight_CL)
    metadata, group = context.metadata, context.metadata.groups[cache.group]
    num_decodes, pieces = metadata.num_decodes, pieces_of(metadata, group, cache.group)
    convolved = []
    if num_decodes:
        window_DLC = _windows(cache, x_TC[:num_decodes], _steps(metadata, group))
        convolved.append(_convolved(window_DLC, weight_CL, bias_C))
    for piece in pieces:
        near_TC = _nearby(cache, x_TC[piece.first : piece.last], piece)
        convolved.append(_sliding(near_TC, weight_CL, bias_C))
        _keep_inputs(cache, near_TC, piece)
    y_TC = convolved[0] if len(convolved) == 1 else torch.cat(convolved)
    given = inputs(y_TC.to(x_TC.dtype))
    parts = []
    if num_decodes:
        steps = _steps(metadata, group)
        parts.append(_decode(cache, [each[:num_decodes] for each in given], recurrence, steps))
    for piece in pieces:
        own = slice(piece.first, piece.last)
        parts.append(_prefill(cache, piece, [each[own] for each in given], recurrence))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def layer_states(layer: int, weight_CL: Tensor) -> tuple[ForwardContext, LayerStates]:
    """Return the current pass's context and the layer's states, and count the call.

    Raises:
        ModelError: the layer has no states, or of another shape.
    """
    context = current()
    cache = context.kv.get(StateOf(layer))
    if not isinstance(cache, LayerStates):
        raise ModelError(f"A recurrence was called for layer {layer}, which has no states.")
    if cache.inputs.shape[1:] != (weight_CL.shape[1] - 1, weight_CL.shape[0]):
        raise ModelError(
            f"Layer {layer} convolves {tuple(weight_CL.shape)}, but its cache was made for {tuple(cache.inputs.shape)}."
        )
    context.called[StateOf(layer)] = context.called.get(StateOf(layer), 0) + 1
    return context, cache


def _steps(metadata: AttnMetadata, group: GroupMetadata) -> _Steps:
    """From tensors on the device alone, so that a graph can hold it."""
    found = group.extra.get("steps")
    if found is None:
        count, size = metadata.num_decodes, metadata.block_size
        lengths_D = metadata.lengths_B[:count].long()
        index_D1 = ((lengths_D - 2).clamp(min=0) // size).unsqueeze(1)
        source_D = group.tables_BN[:count].gather(1, index_D1).squeeze(1).long()
        # Of padding, the slot is that of the null block.
        found = _Steps(source_D, group.slots_T[:count] // size, lengths_D <= 1)
        group.extra["steps"] = found
    assert isinstance(found, _Steps)
    return found


def pieces_of(metadata: AttnMetadata, group: GroupMetadata, index: int) -> Sequence[StateSlice]:
    """Return the slices of more than one token, from the tables on the host."""
    found: list[StateSlice] | None = group.extra.get("pieces")
    if found is not None:
        return found
    found, size, first = [], metadata.block_size, metadata.num_decodes
    for sequence in range(metadata.num_decodes, len(metadata.starts)):
        table = metadata.tables[index][sequence]
        start, stop = metadata.starts[sequence], metadata.lengths[sequence]
        last = int(table[(stop - 1) // size])
        kept = [
            ((place + 1) * size - start, int(table[place]))
            for place in range(start // size, (stop - 1) // size)
            # An entry that the newest state came from holds nothing of its own.
            if table[place] and table[place] != last
        ]
        source = int(table[(start - 1) // size]) if start else None
        found.append(StateSlice(first, first + stop - start, source, (*kept, (stop - start, last))))
        first += stop - start
    group.extra["pieces"] = found
    return found


def _windows(cache: LayerStates, x_DC: Tensor, steps: _Steps) -> Tensor:
    """The inputs that the convolution of each decoding token sees, (D, L, C); the last ones are kept."""
    before_DLC = cache.inputs.index_select(0, steps.source_D).masked_fill_(steps.fresh_D[:, None, None], 0)
    window_DLC = torch.cat([before_DLC, x_DC.unsqueeze(1).to(before_DLC.dtype)], dim=1)
    cache.inputs.index_copy_(0, steps.target_D, window_DLC[:, 1:])
    return window_DLC


def _convolved(window_DLC: Tensor, weight_CL: Tensor, bias_C: Tensor | None) -> Tensor:
    out_DC = torch.einsum("dlc,cl->dc", window_DLC.float(), weight_CL.float())
    return out_DC if bias_C is None else out_DC + bias_C.float()


def _nearby(cache: LayerStates, x_TC: Tensor, piece: StateSlice) -> Tensor:
    """A slice's inputs, and the L - 1 before it: (L - 1 + T, C)."""
    before_LC = torch.zeros_like(cache.inputs[0]) if piece.source is None else cache.inputs[piece.source]
    return torch.cat([before_LC, x_TC.to(before_LC.dtype)])


def _sliding(near_TC: Tensor, weight_CL: Tensor, bias_C: Tensor | None) -> Tensor:
    length = weight_CL.shape[1]
    count = len(near_TC) - length + 1
    weight_LC = weight_CL.float().t()
    out_TC = near_TC[:count].float() * weight_LC[0]
    for place in range(1, length):
        out_TC.addcmul_(near_TC[place : place + count].float(), weight_LC[place])
    return out_TC if bias_C is None else out_TC + bias_C.float()


def _keep_inputs(cache: LayerStates, near_TC: Tensor, piece: StateSlice) -> None:
    for stop, block in piece.kept:
        # The inputs of the last L - 1 positions before `stop`; near_TC begins L - 1 positions before the slice.
        cache.inputs[block].copy_(near_TC[stop : stop + cache.inputs.shape[1]])


def _decode(cache: LayerStates, given: Sequence[Tensor], recurrence: Recurrence, steps: _Steps) -> Tensor:
    states_D = cache.states.index_select(0, steps.source_D)
    # Not multiplied by zero: what lies in a block that was never written need not be a number.
    states_D.masked_fill_(steps.fresh_D.view(-1, *(1,) * (states_D.dim() - 1)), 0)
    out_D = recurrence.step(states_D, *given)
    cache.states.index_copy_(0, steps.target_D, states_D)
    return out_D


def _prefill(cache: LayerStates, piece: StateSlice, given: Sequence[Tensor], recurrence: Recurrence) -> Tensor:
    state = torch.zeros_like(cache.states[0]) if piece.source is None else cache.states[piece.source].clone()
    parts, start = [], 0
    for stop, block in piece.kept:
        for low in range(start, stop, _MOST_TOKENS):
            own = slice(low, min(low + _MOST_TOKENS, stop))
            parts.append(recurrence.scan(state, *(each[own] for each in given)))
        cache.states[block].copy_(state)
        start = stop
    return parts[0] if len(parts) == 1 else torch.cat(parts)
