"""The tail of a step: the tokens that the last layers are run for, and no others.

What the last layer makes of a token whose logits nobody wants is of no use to anybody; only its keys and values are
(`models/last_layer.py`). Layers that read another layer's keys and values write none: in Gemma 4 a prompt's tokens but
the last stop before several layers.

Shapes: T tokens, S wanted logits, N blocks of a table.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from beheld.attention.backend import AttnMetadata
from beheld.attention.context import Tail
from beheld.runner.batch import Batch
from beheld.runner.staging import to_device

# A tail of a layer that is run twice pays with so many tokens for each wanted one, and on a GPU with so many in all.
FEWEST_EACH, FEWEST_ON_GPU = 8, 1024
# Tokens of the pass by which tails are tried.
TRIED = 4


def close(found_SV: Tensor, wanted_SV: Tensor) -> bool:
    """True if these logits differ by rounding alone."""
    bound = 1e-4 if found_SV.dtype == torch.float32 else 0.05
    return bool((found_SV - wanted_SV).norm() <= bound * wanted_SV.norm())


def tail_of(batch: Batch, first_layer: int) -> Tail | None:
    """The tokens that go through the layers from `first_layer` on; None if all do, or nearly all may.

    Where no logits are wanted at all, the first token goes on alone, so that there is something to compute.
    """
    if batch.prompt_targets or batch.num_sampled != len(batch.sampling) or len(batch.sampling) == len(batch.ids_T):
        return None
    index_by_row = {piece.row: index for index, piece in enumerate(batch.slices)}
    sequences = [index_by_row[piece.row] for piece in batch.sampling] or [0]
    stops = [piece.stop for piece in batch.sampling] or [batch.slices[0].start + 1]
    known = batch.metadata
    made = to_device(
        {
            "sequences": np.array(sequences, dtype=np.int64),
            "lengths": np.array(stops, dtype=np.int32),
            "bounds": np.arange(len(stops) + 1, dtype=np.int32),
            # Of the null block, where nothing is stored.
            "slots": np.zeros(len(stops), dtype=np.int64),
            "first": np.zeros(1, dtype=np.int64),
        },
        batch.ids_T.device,
    )
    groups = tuple(
        replace(group, slots_T=made["slots"], tables_BN=group.tables_BN.index_select(0, made["sequences"]), extra={})
        for group in known.groups
    )
    metadata = AttnMetadata(
        num_decodes=len(stops),
        starts=tuple(stop - 1 for stop in stops),
        lengths=tuple(stops),
        lengths_B=made["lengths"],
        cu_q_B1=made["bounds"],
        groups=groups,
        block_size=known.block_size,
        stored=True,
    )
    return Tail(first_layer, batch.wanted_S if batch.sampling else made["first"], metadata)
