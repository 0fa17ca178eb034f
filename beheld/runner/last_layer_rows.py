"""The tail of a step: only tokens whose logits are wanted go through the last layers.

For all other tokens, the last layer's output is not used, only its keys and values are (`models/last_layer.py`). Layers
that read another layer's keys and values write none: in Gemma 4, all tokens of a prompt except the last stop several
layers before the end.

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

# Running a layer twice for a tail pays from this many tokens per wanted one, and on a GPU from this many in total.
FEWEST_EACH, FEWEST_ON_GPU = 8, 1024
# Tokens of the pass that tests whether tails work.
TRIED = 4


def close(found_SV: Tensor, wanted_SV: Tensor) -> bool:
    """True if these logits differ by rounding alone."""
    bound = 1e-4 if found_SV.dtype == torch.float32 else 0.05
    return bool((found_SV - wanted_SV).norm() <= bound * wanted_SV.norm())


def tail_of(batch: Batch, first_layer: int) -> Tail | None:
    """The tokens that go through the layers from `first_layer` on; None if all tokens do.

    If no logits are wanted, the first token alone goes through, so that there is something to compute.
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
            # Slots of the null block: nothing is stored.
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
