"""Recurrent mixers that replace transformers' modules and keep their states in the cache."""

from __future__ import annotations

from torch import nn


class RecurrentMixer(nn.Module):
    """A part of a layer that reads and changes states of sequences; subclasses call attention.recurrent.recur.

    Attributes:
        layer_idx: the layer's index in the text model.
    """

    layer_idx: int


def recurs(module: nn.Module) -> bool:
    """Return whether a layer, or a part of it, is recurrent."""
    return any(isinstance(part, RecurrentMixer) for part in module.modules())
