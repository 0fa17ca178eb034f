"""Recurrent mixers that replace transformers' modules and keep their states in the cache."""

from __future__ import annotations

from torch import nn


class RecurrentMixer(nn.Module):
    """A part of a layer that reads and changes states of sequences; subclasses call attention.recurrent.recur.

    Attributes:
        layer_idx: the layer's index in the text model.
        compiles: whether its recurrence is a registered operator, so that torch.compile can trace its layer.
    """

    layer_idx: int
    compiles = False


def recurs(module: nn.Module) -> bool:
    """Return whether a layer, or a part of it, is recurrent."""
    return any(isinstance(part, RecurrentMixer) for part in module.modules())


def compiles(module: nn.Module) -> bool:
    """Return whether torch.compile can trace a layer as far as its recurrences are concerned."""
    return all(part.compiles for part in module.modules() if isinstance(part, RecurrentMixer))
