"""The third section of a family: how its model runs, where transformers' interfaces do not say.

A folder's model.py defines MODEL. Its functions may use models/.

Shapes: T tokens of a step, E embeddings of one tower call, H hidden size, W extra columns, S pooled states, D classes.
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
# An item within another, and the places of its embeddings among the other's.
ItemPart = tuple[EncodeItem, Tensor]
CombineRule = Callable[[Sequence[EncodeItem]], list[TowerCall]]


class ExtraColumns(Protocol):
    """Inputs of a family's layers in addition to embeddings: `width` extra columns of the same rows."""

    width: int

    def of_tokens(self, ids_T: Tensor, embeds_TH: Tensor) -> Tensor | None:
        """Return the extra columns (T, W) of text tokens; None if they are zero."""

    def of_media(self, result: Any) -> Tensor | None:
        """Return the extra columns (E, at most W) of a tower's result; None to keep the tokens' columns."""

    def of_given(self, embeds_EH: Tensor) -> Tensor | None:
        """Return the extra columns (E, at most W) of embeddings given as input; None to keep the tokens' columns."""

    def hidden(self, embeds_TH: Tensor, extra_TW: Tensor, positions: Tensor) -> Tensor:
        """See ModelAdapter.hidden; `positions` are in the model's form."""


class CrossInputs(Protocol):
    """A family with layers that attend to states of media or of an encoder instead of the text."""

    def encode(self, items: Sequence[EncodeItem]) -> list[Tensor]:
        """See ModelAdapter.encode."""

    def cross_views(self, spans: Sequence[SpanView], num_prompt: int) -> tuple[CrossView, ...]:
        """See ModelAdapter.cross_views."""

    def hidden(self, embeds_TH: Tensor, positions: Tensor) -> Tensor:
        """See ModelAdapter.hidden; `positions` are in the model's form."""


@dataclass(frozen=True)
class PackedTower:
    """The keywords of a tower of packed images, except pixels and grid; see models/packed.py.

    Attributes:
        positions: whether it takes patch positions.
        windows: whether it also attends within windows.
        learned: the module within the tower that resamples its learned positions, "" for the tower itself; None if it
            takes none.
        merge: patches per side that are laid out together; None for the tower's `spatial_merge_size`.
    """

    positions: bool = True
    windows: bool = False
    learned: str | None = None
    merge: int | None = None


def pooled(model: Any, modality: str, result: Any) -> Any:
    """Return the result of most towers: a tensor (..., H), or one per item."""
    # A family without a tower only maps patches to embeddings, without pooling.
    return result.last_hidden_state if result.pooler_output is None else result.pooler_output


@dataclass(frozen=True)
class FamilyModel:
    """How the family's model runs.

    Attributes:
        adapt: replaces the parts of a loaded model that cannot compute batches in the engine's layout or cannot be
            captured, and records each change; an operation of the stage ADAPT, see models/surgery/operation.py.
        combine: how items share a tower call; None for items whose tensors differ only in the first dimension.
        parts: for items of several modalities (FamilyInputs.interleave): the items whose embeddings an item's are, each
            with its embeddings' places among them; () for other items.
        image_features, audio_features: computes embeddings (sum of E, H) from the model and the items' features, if no
            single method of the model does.
        embeds: computes embeddings from the model, a modality and a tower's result: a tensor (..., H), or one per item.
        extra_columns: makes the extra columns of a model, if it has any; records its changes.
        columns_before_layers: whether only what runs before the first layer reads them, so that the last layer may
            leave out tokens of a prompt.
        cross_inputs: makes what a model's layers attend to instead of the text.
        keywords: makes extra keyword arguments of a pass, for all layers, from the model and the step's positions.
        tail_from: lets the last layers, if they write no keys, process a pass's tail, records that, and returns the
            first of them; None if there are none.
        scores: computes the classes' scores (S, D) from a model and pooled hidden states (S, H), if its head is not one
            matrix.
        vectors: computes vectors (S, D) from a model and pooled hidden states (S, H), if its class has layers for that.
        text_vectors: computes vectors (T, D) at each token from a model, embeddings (T, H) and positions (T), if the
            model has one tower for text and one for images; see models/two_towers.py.
        plain_head: whether its head is one matrix on the last hidden states, and nothing is done to the logits.
        position_unit: the number of fractions per position, for families with fractional positions.
        plain_axes: whether the axes of a position are equal everywhere, and so the model has no get_rope_index.
        repeats_positions: whether tokens of an item share a position, of a single axis, as the model's get_rope_index
            says.
        positions_by_kind: whether positions depend only on tokens' kinds and items' sizes, not on ids.
        host_features: features whose values its tower reads as Python numbers; they stay on the host.
        exact_features: features that keep float32 whatever the model's type, because its tower computes in float32.
        packed: its tower's keywords, if it packs images; else None.
        packs_attention: whether its tower packs images, and calls attention with the cumulative lengths as its only
            special argument; see attention/tower.py.
        towers: modality -> modules that serve it, if transformers does not name them (`get_encoder`).
        renamed: weights of a layout unknown to transformers under its names, from the weights and config.json's
            content; None if they have these.
        unused_weights: prefixes of weights of parts that are left out.
        unread: names of modules, wherever they are in a model, whose results no answer needs: see models/unread.py.
    """

    adapt: Callable[[Any, Changes], None] | None = None
    combine: CombineRule | None = None
    parts: Callable[[EncodeItem], tuple[ItemPart, ...]] | None = None
    image_features: Callable[..., Tensor] | None = None
    audio_features: Callable[..., Tensor] | None = None
    embeds: Callable[[Any, str, Any], Any] = pooled
    extra_columns: Callable[[Any, Changes], ExtraColumns | None] | None = None
    columns_before_layers: bool = False
    cross_inputs: Callable[[Any], CrossInputs] | None = None
    keywords: Callable[[Any, Tensor], dict[str, Any]] | None = None
    tail_from: Callable[[Any, Changes], int | None] | None = None
    scores: Callable[[Any, Tensor], Tensor] | None = None
    vectors: Callable[[Any, Tensor], Tensor] | None = None
    text_vectors: Callable[[Any, Tensor, Tensor], Tensor] | None = None
    plain_head: bool = False
    position_unit: int = 1
    plain_axes: bool = False
    repeats_positions: bool = False
    positions_by_kind: bool = False
    host_features: frozenset[str] = frozenset()
    exact_features: frozenset[str] = frozenset()
    packed: PackedTower | None = None
    packs_attention: bool = False
    towers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    renamed: Callable[[Mapping[str, Tensor], Mapping[str, Any]], dict[str, Tensor] | None] | None = None
    unused_weights: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
