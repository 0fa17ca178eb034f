"""What the runner needs of a model, whichever library defines it.

Shapes: T tokens of a step, S positions whose logits are wanted, H hidden size, V vocabulary, X position axes,
E embeddings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from beheld.attention.context import tail
from beheld.attention.cross import CrossView
from beheld.core.config import ModelInfo
from beheld.core.plan import EncodeItem, SpanView
from beheld.lora.slots import LoRASlots


class ModelAdapter(Protocol):
    """Any model, seen from the runner.

    Of a model with a cross group, an item's embedding is keys and values of one state in all layers of that group,
    (L, 2, K, C): nothing of it goes into the text.
    """

    info: ModelInfo
    device: torch.device
    dtype: torch.dtype
    lora: LoRASlots | None
    """Where LoRA adapters are kept; None if there can be none."""
    tail_from: int | None
    """The layer from which on a pass may have a tail, see attention/context.py; None if it may have none."""
    tail_stores: bool
    """True if that is the last layer, which is run twice, since it writes keys and values (models/last_layer.py)."""
    position_unit: int
    """How much the next position is greater: 1, but where positions have fractions. These are held as whole numbers."""

    def capture_calls(self) -> None:
        """From now on, capture tower calls of sizes that come again, as CUDA graphs."""

    def embed(self, ids_T: Tensor) -> Tensor:
        """Token embeddings (T, H), followed in some families by further columns that only `hidden` understands."""

    def encode(self, items: Sequence[EncodeItem]) -> list[Tensor]:
        """Run the towers; one tensor (E, H) per item, in order; it may have further columns, as `embed`."""

    def positions(self, token_ids: Sequence[int], spans: Sequence[SpanView]) -> tuple[np.ndarray, int]:
        """Rotary positions (X, len(token_ids)) of a prompt, and what to add to a later index to get its position; in
        parts of a position, of which `position_unit` are one."""

    def cross_views(self, spans: Sequence[SpanView], num_prompt: int) -> tuple[CrossView, ...]:
        """For each span of a model with a cross group, which positions look at it; nothing for other models."""

    def hidden(self, embeds_TH: Tensor, positions_XT: Tensor) -> Tensor:
        """One pass over the step's tokens under the current attention context; last hidden states (T, H).

        Of a pass with a tail, those of the tail's rows alone; see `of_wanted`.
        """

    def logits(self, hidden_SH: Tensor) -> Tensor:
        """Logits (S, V) of last hidden states."""

    def weights_bytes(self) -> int:
        """Memory that the weights take."""


def of_wanted(hidden_TH: Tensor, wanted_S: Tensor) -> Tensor:
    """The hidden states (S, H) of the wanted tokens of a pass.

    A tail's rows are the wanted ones already, or one row where none is wanted.
    """
    return hidden_TH[wanted_S] if tail() is None else hidden_TH[: len(wanted_S)]


def in_positions(parts_XT: Tensor, unit: int) -> Tensor:
    """Rotary positions as a model takes them, of those that are held in parts of which `unit` are one."""
    return parts_XT if unit == 1 else parts_XT.to(torch.float32) / unit


__all__ = ["Features", "LoRASlots", "ModelAdapter", "in_positions", "of_wanted"]

Features = Mapping[str, Any]
