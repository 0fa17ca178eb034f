"""What the runner needs of a model, whichever library defines it.

Shapes: T tokens of a step, S positions whose logits are wanted, H hidden size, V vocabulary, X position axes,
E embeddings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

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
        """Token embeddings (T, H), followed in some families by further columns that only `forward` understands."""

    def encode(self, items: Sequence[EncodeItem]) -> list[Tensor]:
        """Run the towers; one tensor (E, H) per item, in order; it may have further columns, as `embed`."""

    def positions(self, token_ids: Sequence[int], spans: Sequence[SpanView]) -> tuple[np.ndarray, int]:
        """Rotary positions (X, len(token_ids)) of a prompt, and what to add to a later index to get its position; in
        parts of a position, of which `position_unit` are one."""

    def cross_views(self, spans: Sequence[SpanView], num_prompt: int) -> tuple[CrossView, ...]:
        """For each span of a model with a cross group, which positions look at it; nothing for other models."""

    def forward(self, embeds_TH: Tensor, positions_XT: Tensor, wanted_S: Tensor) -> Tensor:
        """One pass over the step's tokens under the current attention context; logits (S, V) at the wanted tokens."""

    def forward_pieces(self, embeds_TH: Tensor, positions_XT: Tensor, pieces_S: Sequence[Tensor]) -> Iterator[Tensor]:
        """As `forward`, with the logits of one piece of the wanted tokens after the other, which need not be held at
        once; all must be taken while the context is the current one."""

    def weights_bytes(self) -> int:
        """Memory that the weights take."""


def in_positions(parts_XT: Tensor, unit: int) -> Tensor:
    """Rotary positions as a model takes them, of those that are held in parts of which `unit` are one."""
    return parts_XT if unit == 1 else parts_XT.to(torch.float32) / unit


__all__ = ["Features", "LoRASlots", "ModelAdapter", "in_positions"]

Features = Mapping[str, Any]
