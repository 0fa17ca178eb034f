"""The protocol of a model as the runner uses it, whichever library defines the model.

Shapes: T tokens of a step, S positions whose logits are needed, H hidden size, V vocabulary, D numbers of a
vector, X position axes, E embeddings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from beheld.attention.context import tail
from beheld.attention.cross import CrossView
from beheld.core.config import ModelInfo
from beheld.core.plan import EncodeItem, SpanView
from beheld.lora.slots import LoRASlots
from beheld.models.surgery.staged import Seams


class ModelAdapter(Protocol):
    """Any model, as the runner uses it.

    In a model with a cross group, an item's embedding is the keys and values of one state in all layers of the group,
    (L, 2, K, C); none of it enters the text.
    """

    info: ModelInfo
    model: nn.Module
    """What computes, with its weights."""
    device: torch.device
    dtype: torch.dtype
    lora: LoRASlots | None
    """The slots of LoRA adapters; None if the model supports none."""
    tail_from: int | None
    """The layer from which on a pass may have a tail, see attention/context.py; None if it may have none."""
    tail_stores: bool
    """Whether that layer stores keys and values, and so runs twice (models/surgery/last_layer.py)."""
    position_unit: int
    """Position increment per token: 1, or more if positions have fractions, which are held as integers."""
    seams: Seams | None
    """Where hidden states enter and leave a stage of a pipeline; None if this device has all layers."""

    @property
    def layers_see_embeds(self) -> bool:
        """Whether layers read the tokens' embeddings, which each stage of a pipeline then sends on."""

    @property
    def widest(self) -> ModelInfo:
        """This rank's facts, with as many layers in each cache group as any stage of a pipeline has."""

    def layers(self) -> list[nn.Module]:
        """The layers of the text model and the towers, which a pass goes through one after another."""

    def capture_calls(self) -> None:
        """Capture tower calls with recurring sizes as CUDA graphs from now on."""

    def embed(self, ids_T: Tensor) -> Tensor:
        """Return token embeddings (T, H); some families append columns that only `hidden` understands."""

    def encode(self, items: Sequence[EncodeItem]) -> list[Tensor]:
        """Run the towers; return one tensor (E, H) per item, in order, with extra columns as in `embed`."""

    def positions(
        self, token_ids: Sequence[int], spans: Sequence[SpanView], second: int | None = None
    ) -> tuple[np.ndarray, int]:
        """Return rotary positions (X, len(token_ids)) of a prompt, and what to add to a later index for its position.

        Both are in units of 1 / `position_unit`. `second` is where the second of two texts starts, see Pooling.
        """

    def cross_views(self, spans: Sequence[SpanView], num_prompt: int) -> tuple[CrossView, ...]:
        """Return which positions attend to each span in a model with a cross group; empty for other models."""

    def hidden(self, embeds_TH: Tensor, positions_XT: Tensor) -> Tensor:
        """Run the step's tokens in the current attention context; return last hidden states (T, H).

        A pass with a tail returns only those of the tail's rows; see `of_wanted`.
        """

    def logits(self, hidden_SH: Tensor) -> Tensor:
        """Return logits (S, V) of last hidden states."""

    def pool(self, hidden_SH: Tensor) -> Tensor:
        """Return vectors or scores (S, D) of pooled hidden states, neither truncated nor activated."""


def of_wanted(hidden_TH: Tensor, wanted_S: Tensor) -> Tensor:
    """Return the hidden states (S, H) of the wanted tokens of a pass.

    A tail's output has only the wanted rows, or one row if none is wanted.
    """
    return hidden_TH[wanted_S] if tail() is None else hidden_TH[: len(wanted_S)]


def in_positions(parts_XT: Tensor, unit: int) -> Tensor:
    """Return rotary positions as a model takes them, from positions held in fractions of 1 / `unit`."""
    return parts_XT if unit == 1 else parts_XT.to(torch.float32) / unit


__all__ = ["Features", "LoRASlots", "ModelAdapter", "in_positions", "of_wanted"]

Features = Mapping[str, Any]
