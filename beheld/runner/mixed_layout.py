"""Where a step's numbers lie in the graph that carries it out: one block of bytes, sent to the device in one copy.

Each call that launches something on the device releases the interpreter lock and then waits for all threads that
prepare media: sixty calls a step took 30 to 100 ms. So the numbers are laid out on the host, padded as the graph needs
them (see mixed_graphs.py), and the graph reads them where the copy puts them.

Shapes: T tokens, B sequences, S wanted logits, G KV groups, X position axes, all of the graph.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from beheld.runner.batch import Layout

# Every array begins at a multiple of this, as vectorised loads want it.
_ALIGNMENT = 16


class Size(NamedTuple):
    """What a graph holds.

    Attributes:
        tokens: of sequences that prefill; with no `decodes`, those that decode are among them.
        sequences: that prefill; where some decode apart, of both together.
        decodes: sequences that decode.
        prefixes: True if sequences may continue what the cache holds.
    """

    tokens: int
    sequences: int
    decodes: int = 0
    prefixes: bool = True


class Fields(NamedTuple):
    """A graph's numbers, as arrays on the host or as tensors on the device.

    Attributes:
        ids_T: token ids; one more at the end, where padding writes.
        positions_XT: rotary positions.
        slots_GT: where keys and values are stored; 0 for padding.
        wanted_S: the tokens whose logits are wanted.
        owners_S: the sequence of each wanted token.
        seen_S: how many positions that token sees, int32.
        places_B, sources_B: of tokens that only the device knows: where they belong among the ids, and where they stand
            in Rows.newest_P.
        sampled_S: where in Rows.newest_P the sampled tokens will stand.
        merged_T: which tokens take an embedding, in the order of these.
        rows_B: each sequence's row, int64.
        starts_B, lengths_B, bounds_B: first position, length and first token of each sequence, int32; of the bounds
            there is one more.
    """

    ids_T: Tensor
    positions_XT: Tensor
    slots_GT: Tensor
    wanted_S: Tensor
    owners_S: Tensor
    seen_S: Tensor
    places_B: Tensor
    sources_B: Tensor
    sampled_S: Tensor
    merged_T: Tensor
    rows_B: Tensor
    starts_B: Tensor
    lengths_B: Tensor
    bounds_B: Tensor


class GraphLayout(NamedTuple):
    """The layout of one size of graph: where each field begins, its type and shape, and the bytes of them all."""

    fields: tuple[tuple[int, str, tuple[int, ...]], ...]
    num_bytes: int

    @classmethod
    def of(cls, size: Size, axes: int, groups: int) -> GraphLayout:
        """Args: numbers of position axes and of KV groups."""
        tokens, sequences, wanted = size.tokens + size.decodes, size.sequences + size.decodes, size.sequences
        shapes: dict[str, tuple[str, tuple[int, ...]]] = {
            "ids_T": ("int64", (tokens + 1,)),
            "positions_XT": ("int64", (axes, tokens)),
            "slots_GT": ("int64", (groups, tokens)),
            "wanted_S": ("int64", (wanted,)),
            "owners_S": ("int64", (wanted,)),
            "seen_S": ("int32", (wanted,)),
            "places_B": ("int64", (sequences,)),
            "sources_B": ("int64", (sequences,)),
            "sampled_S": ("int64", (wanted,)),
            "merged_T": ("int64", (tokens,)),
            "rows_B": ("int64", (sequences,)),
            "starts_B": ("int32", (sequences,)),
            "lengths_B": ("int32", (sequences,)),
            "bounds_B": ("int32", (sequences + 1,)),
        }
        begin, fields = 0, []
        for name in Fields._fields:
            dtype, shape = shapes[name]
            fields.append((begin, dtype, shape))
            begin += -(-np.dtype(dtype).itemsize * math.prod(shape) // _ALIGNMENT) * _ALIGNMENT
        return cls(tuple(fields), begin)

    def on_host(self, flat: np.ndarray) -> dict[str, np.ndarray]:
        """The fields, by name, as parts of `flat`, bytes."""
        parts = [
            flat[begin : begin + np.dtype(dtype).itemsize * math.prod(shape)].view(dtype).reshape(shape)
            for begin, dtype, shape in self.fields
        ]
        return dict(zip(Fields._fields, parts, strict=True))

    def on_device(self, flat: Tensor) -> Fields:
        """The fields as parts of `flat`, bytes."""
        return Fields(
            *(
                flat[begin : begin + np.dtype(dtype).itemsize * math.prod(shape)]
                .view(getattr(torch, dtype))
                .view(shape)
                for begin, dtype, shape in self.fields
            )
        )


def lay_in(fields: Mapping[str, np.ndarray], size: Size, laid: Layout, merged: np.ndarray) -> None:
    """Overwrite a graph's fields with a step's numbers.

    Args:
        fields: by the names of Fields, on the host.
        merged: which tokens of the step take an embedding.
    """
    arrays, decodes = laid.arrays, laid.num_decodes
    # After `split` sequences, of one token each, `shift` padding sequences follow.
    split = decodes if size.decodes else 0
    shift = size.decodes - split
    count, total = len(laid.counts), len(arrays["ids"])
    stop, last = count + shift, total + shift
    rest = slice(split + shift, last)
    wanted, lengths, bounds = arrays["wanted"], arrays["lengths"], arrays["bounds"]

    ids_T = fields["ids_T"]
    ids_T[:] = 0
    _spread(ids_T, arrays["ids"], split, shift)
    for axis, positions_T in zip(fields["positions_XT"], arrays["positions"], strict=True):
        _spread(axis, positions_T, split, shift)
        axis[split : rest.start] = 0
        axis[last:] = 0
    fields["slots_GT"][:] = 0
    for index, slots_T in enumerate(fields["slots_GT"]):
        _spread(slots_T, arrays[f"slots {index}"], split, shift)

    # Padding is the first token, again and again, which sees itself alone.
    owners = np.searchsorted(bounds[1:], wanted, side="right")
    _padded(fields["wanted_S"], _shifted(wanted, split, shift), 0)
    _padded(fields["owners_S"], _shifted(owners, split, shift), 0)
    _padded(fields["seen_S"], lengths[owners], 1)
    _padded(fields["sampled_S"], arrays["sampled"], 0)
    _padded(fields["places_B"], _shifted(arrays["places"], split, shift), len(ids_T) - 1)
    _padded(fields["sources_B"], arrays["sources"], 0)
    _padded(fields["merged_T"], _shifted(merged, split, shift), 0)

    fields["rows_B"][:] = 0
    _spread(fields["rows_B"], np.array([piece.row for piece in laid.slices]), split, shift)
    fields["starts_B"][:] = 0
    # A sequence's first position is its length less its tokens of this step.
    _spread(fields["starts_B"], lengths - np.diff(bounds), split, shift)
    fields["lengths_B"][:] = 1
    _spread(fields["lengths_B"], lengths, split, shift)
    bounds_B = fields["bounds_B"]
    bounds_B[: size.decodes + 1] = np.arange(size.decodes + 1)
    bounds_B[size.decodes : stop + 1] = bounds[split:] + shift
    bounds_B[stop + 1 :] = last


def _spread(target: np.ndarray, source: np.ndarray, split: int, shift: int) -> None:
    """Copy `source` to the start of `target`, but from index `split` on by `shift` places further."""
    target[:split] = source[:split]
    target[split + shift : len(source) + shift] = source[split:]


def _shifted(places: np.ndarray, split: int, shift: int) -> np.ndarray:
    """Where these places of a step lie in its graph."""
    return np.where(places < split, places, places + shift)


def _padded(target: np.ndarray, source: np.ndarray, padding: int) -> None:
    target[: len(source)] = source
    target[len(source) :] = padding
