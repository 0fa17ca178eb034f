"""The third section of a family: what transformers' own interfaces do not tell of how its model is run.

A folder's model.py holds MODEL. Its functions may use what models/ offers.

Shapes: T tokens of a step, E embeddings of one tower call, H hidden size, W further columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from beheld.attention.cross import CrossView
from beheld.core.plan import EncodeItem, SpanView
from beheld.models.surgery.operation import Changes

# One tower call: modality (or "embeds" for embeddings given as input), indices of its items, keyword arguments.
TowerCall = tuple[str, list[int], dict[str, Any]]
CombineRule = Callable[[Sequence[EncodeItem]], list[TowerCall]]


class ExtraColumns(Protocol):
    """What a family's layers take besides embeddings: `width` further columns of the same rows."""

    width: int

    def of_tokens(self, ids_T: Tensor, embeds_TH: Tensor) -> Tensor | None:
        """The further columns (T, W) of text tokens; None if they are zero."""

    def of_media(self, result: Any) -> Tensor | None:
        """The further columns (E, at most W) of what a tower returned; None to leave those of the tokens."""

    def of_given(self, embeds_EH: Tensor) -> Tensor | None:
        """The further columns (E, at most W) of embeddings that came in place of media; None as above."""

    def hidden(self, embeds_TH: Tensor, extra_TW: Tensor, positions: Tensor) -> Tensor:
        """As ModelAdapter.hidden; `positions` in the model's own form."""


class CrossInputs(Protocol):
    """A family some of whose layers attend to states of media or of an encoder instead of the text."""

    def encode(self, items: Sequence[EncodeItem]) -> list[Tensor]:
        """As ModelAdapter.encode."""

    def cross_views(self, spans: Sequence[SpanView], num_prompt: int) -> tuple[CrossView, ...]:
        """As ModelAdapter.cross_views."""

    def hidden(self, embeds_TH: Tensor, positions: Tensor) -> Tensor:
        """As ModelAdapter.hidden; `positions` in the model's own form."""


@dataclass(frozen=True)
class PackedTower:
    """What a tower of packed images takes as keywords besides pixels and grid; see models/packed.py.

    Attributes:
        positions: it takes positions of patches.
        windows: it attends within windows too.
        learned: the module within the tower that says how its learned positions are resampled, "" for the tower itself;
            None if it takes none.
        merge: patches of a side that are laid out together; None for the tower's own `spatial_merge_size`.
    """

    positions: bool = True
    windows: bool = False
    learned: str | None = None
    merge: int | None = None


def pooled(model: Any, modality: str, result: Any) -> Any:
    """What most towers return: a tensor (..., H), or one for each item."""
    # A family without a tower only maps patches to embeddings, which nothing pools.
    return result.last_hidden_state if result.pooler_output is None else result.pooler_output


@dataclass(frozen=True)
class FamilyModel:
    """How the family's model is run.

    Attributes:
        adapt: replaces what in a loaded model cannot compute a batch as the engine lays it out, or cannot be captured,
            and notes each change; an operation of the stage ADAPT, see models/surgery/operation.py.
        combine: how items share a tower call; None for items whose tensors differ in the first dimension alone.
        image_features, audio_features: makes embeddings (sum of E, H) of the model and the features of items, where no
            method of the model's own gives them, or not alone.
        embeds: makes embeddings of the model, a modality and a tower's result: a tensor (..., H), or one for each item.
        extra_columns: makes the further columns of a model, if it has any; it notes what it changes.
        cross_inputs: makes what a model's layers attend to instead of the text.
        keywords: makes further keyword arguments of a pass, for all layers, of the model and the step's positions.
        tail_from: lets the last layers take a pass's tail where they write no keys, notes that, and gives the first of
            them; None if there are none.
        plain_head: its head is one matrix over the last hidden states, and nothing is done to the logits.
        position_unit: how many parts a position has, where a family has fractions of one.
        positions_by_kind: positions follow from the kinds of tokens and the sizes of items, whatever the ids.
        host_features: features that its tower reads as numbers and nothing else; they stay on the host.
        packed: what its tower takes as keywords, if it packs images; else None.
        packs_attention: its tower packs images, and calls attention with the running sum of lengths and nothing else
            of its own; see attention/tower.py.
        towers: modality -> modules that serve it, where transformers does not name them (`get_encoder`).
        renamed: weights of an older layout, which transformers does not know, under its names; None if they have these.
        unused_weights: prefixes of weights that belong to parts which are left out.
    """

    adapt: Callable[[Any, Changes], None] | None = None
    combine: CombineRule | None = None
    image_features: Callable[..., Tensor] | None = None
    audio_features: Callable[..., Tensor] | None = None
    embeds: Callable[[Any, str, Any], Any] = pooled
    extra_columns: Callable[[Any, Changes], ExtraColumns | None] | None = None
    cross_inputs: Callable[[Any], CrossInputs] | None = None
    keywords: Callable[[Any, Tensor], dict[str, Any]] | None = None
    tail_from: Callable[[Any, Changes], int | None] | None = None
    plain_head: bool = False
    position_unit: int = 1
    positions_by_kind: bool = False
    host_features: frozenset[str] = frozenset()
    packed: PackedTower | None = None
    packs_attention: bool = False
    towers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    renamed: Callable[[Mapping[str, Tensor]], dict[str, Tensor] | None] | None = None
    unused_weights: tuple[str, ...] = ()
