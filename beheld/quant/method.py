"""What a way to store weights in fewer bits must answer: one file a method, and `registry` names them.

A method decides per module what is stored, how it multiplies (its StoredLinear and StoredExperts, see linear.py), how
rows are joined and in which units they are sharded. The loader (models/load.py) asks in this order:

    method_for(stated, device, dtype)     registry: by the checkpoint's quantization_config; refuses by name
      .config(hf_config)                  what transformers is told
      .weights(path)                      name -> weight, read when it is indexed
      .loading(model_class, weights)      a class whose models have room for what is stored
      .settle(model, replace)             layers that multiply it stand in place of transformers' own
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

# Puts a module in place of a submodule: parent, name, the new one, and what makes the old one of it again.
Replace = Callable[[nn.Module, str, nn.Module, Callable[[nn.Module], nn.Module]], None]


class QuantMethod(Protocol):
    """How the weights of one checkpoint are stored, loaded and multiplied, on one device and with one type of
    activations.

    Attributes:
        name: as a checkpoint's `quant_method` says it.
        converted: in words, what `weights` makes of what is stored where it is not kept; for `verify`'s report.
    """

    name: str
    converted: str

    def config(self, hf_config: Any) -> Any:
        """The configuration that transformers' loader is given."""

    def weights(self, path: Path) -> dict[str, Any] | None:
        """Name -> weight of the checkpoint in `path`, none of them read yet: indexing with `...` reads one.

        A weight that is not kept as it is stored comes dequantized. None: transformers' loader reads the files itself.

        Raises:
            ModelError: the files do not hold what they should.
        """

    def loading(self, model_class: Any, weights: dict[str, Any]) -> Any:
        """A class like `model_class` whose models have room for what is stored; it may replace entries of `weights`."""

    def settle(self, model: Any, model_class: Any, replace: Replace) -> None:
        """Put layers in place that multiply what the loader brought; the model is then one of `model_class`."""

    def stored_bytes(self, path: Path) -> int | None:
        """What the weights take on the device; None if as much as their numbers in the type of activations."""


class Make(Protocol):
    """Makes a method for one checkpoint."""

    def __call__(self, stated: Mapping[str, Any], device: str, dtype: torch.dtype) -> QuantMethod:
        """The method of a checkpoint that says `stated` of its weights.

        Raises:
            ModelError: it says something that is not built, which the message names.
        """
