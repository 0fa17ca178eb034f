"""How a pass gives hidden states: one form for each kind of model, chosen once when it is loaded.

Shapes: T tokens of a step, H hidden size, W extra columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from beheld.families.model import CrossInputs, ExtraColumns, FamilyModel


class HiddenForm(Protocol):
    """Runs a model's layers."""

    def __call__(self, embeds_TH: Tensor, positions: Tensor) -> Tensor:
        """Return last hidden states (T, H), or only those of the tail's rows; `positions` are in the model's form."""


class TextHidden:
    """Text alone: media are embeddings like any others.

    Args:
        model: of transformers.
        core: its part that computes hidden states.
        keywords: see FamilyModel.
    """

    def __init__(self, model: Any, core: Any, keywords: Callable[[Any, Tensor], dict[str, Any]] | None) -> None:
        self._model, self._core = model, core
        self._keywords = keywords

    def __call__(self, embeds_TH: Tensor, positions: Tensor) -> Tensor:
        """See HiddenForm."""
        more = {} if self._keywords is None else self._keywords(self._model, positions)
        output = self._core(inputs_embeds=embeds_TH.unsqueeze(0), position_ids=positions, use_cache=False, **more)
        hidden_TH: Tensor = output.last_hidden_state[0]
        return hidden_TH


class ColumnsHidden:
    """Text whose rows have extra columns, which layers take besides the embeddings."""

    def __init__(self, columns: ExtraColumns, hidden_size: int) -> None:
        self._columns = columns
        self._hidden_size = hidden_size

    def __call__(self, embeds_TH: Tensor, positions: Tensor) -> Tensor:
        """See HiddenForm; `embeds_TH` is (T, H + W)."""
        return self._columns.hidden(embeds_TH[:, : self._hidden_size], embeds_TH[:, self._hidden_size :], positions)


class CrossHidden:
    """Text whose layers attend to states of media, which the forward context holds."""

    def __init__(self, cross: CrossInputs) -> None:
        self._cross = cross

    def __call__(self, embeds_TH: Tensor, positions: Tensor) -> Tensor:
        """See HiddenForm."""
        return self._cross.hidden(embeds_TH, positions)


def form_of(
    family: FamilyModel,
    model: Any,
    core: Any,
    hidden_size: int,
    columns: ExtraColumns | None,
    cross: CrossInputs | None,
) -> HiddenForm:
    """Return the form of this model."""
    if cross is not None:
        return CrossHidden(cross)
    if columns is not None:
        return ColumnsHidden(columns, hidden_size)
    return TextHidden(model, core, family.keywords)
