"""The forward context, the only global: what attention layers read while a forward pass runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from beheld.attention.backend import AttentionBackend, AttnMetadata, LayerCache, LayerKey
from beheld.attention.cross import CrossBackend, CrossMetadata


@dataclass(eq=False)
class CrossContext:
    """The states that cross-attention layers attend to in a pass.

    Attributes:
        index_by_layer: layer -> its index in the group.
        called: calls per layer.
        watched: layers whose queries are wanted -> these, scaled, (T, H, C); None until the layer is called.
    """

    backend: CrossBackend
    metadata: CrossMetadata
    index_by_layer: Mapping[int, int]
    called: dict[int, int] = field(default_factory=dict)
    watched: dict[int, Tensor | None] = field(default_factory=dict)


@dataclass(eq=False)
class Tail:
    """The last layers of a pass, which only process tokens whose logits are needed.

    Attributes:
        first_layer: the first of these layers.
        rows_S: the tokens, as indices into the batch.
        metadata: of these tokens, each a decoding sequence; nothing is stored.
        storing: whether a layer's attention is run only to store all tokens' keys and values
            (models/surgery/last_layer.py).
        stored: whether it has stored them.
    """

    first_layer: int
    rows_S: Tensor
    metadata: AttnMetadata
    storing: bool = False
    stored: bool = False


@dataclass(eq=False)
class ForwardContext:
    """Backend, metadata and caches of the current forward pass.

    Attributes:
        lora: the tokens' LoRA adapters (lora/step.py); None if no token has one.
        kv: what each layer keeps, by its number; recurrent states by StateOf(number).
        called: hook calls per key of `kv`.
        cross: None if no sequence of the step has states to attend to.
        tail: None if all tokens go through all layers.
    """

    backend: AttentionBackend
    metadata: AttnMetadata
    kv: Mapping[LayerKey, LayerCache]
    lora: Any = None
    called: dict[LayerKey, int] = field(default_factory=dict)
    cross: CrossContext | None = None
    tail: Tail | None = None


_current: ForwardContext | None = None


@contextmanager
def forward_context(context: ForwardContext) -> Iterator[ForwardContext]:
    """Make `context` the current one; passes do not nest."""
    global _current
    assert _current is None, "a forward pass is already under way"
    _current = context
    try:
        yield context
    finally:
        _current = None


def current() -> ForwardContext:
    """Return the context of the current forward pass."""
    assert _current is not None, "attention was called outside a forward pass"
    return _current


def tail() -> Tail | None:
    """Return the tail of the current pass; None outside a pass or if it has none."""
    return None if _current is None else _current.tail
