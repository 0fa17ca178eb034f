"""The protocol of quantization methods; each method is one file, listed in `registry`.

A method decides per module what is stored, how it multiplies (StoredLinear and StoredExperts, see linear.py), how rows
are joined, and which part of it a rank reads. The loader (models/load.py) calls in this order:

    method_for(stated, at_load, target)
                                          registry: by the checkpoint's quantization_config, or, for a checkpoint
                                          without one, by the option `quantization`; refuses by name
      .config(hf_config)                  the configuration for transformers
      .weights(path)                      name -> weight, read on indexing
      .kept_as(parameter, weights)        for ranks: how a weight is stored, which a rank's part of it has to be too
      .loading(model_class, weights)      a class whose models have room for stored weights
      .settle(model, model_class, text_of, replace)
                                          replaces layers by ones that multiply stored weights
      .stored_bytes(path, model, text_of) the size of weights, for `plan` and before memory is taken for them
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

# Replaces a submodule: the parent, its name, the new module, and a function that makes the old one from the new.
Replace = Callable[[nn.Module, str, nn.Module, Callable[[nn.Module], nn.Module]], None]
# Returns the part of a model that holds the decoder layers.
TextOf = Callable[[Any], nn.Module]


@dataclass(frozen=True)
class StorageTarget:
    """What weights are made for.

    Attributes:
        device: the model's.
        dtype: of the activations.
        exact: whether the numbers that a checkpoint means are wanted, and exact activations, at the price of memory.
    """

    device: str
    dtype: torch.dtype
    exact: bool = False


class QuantMethod(Protocol):
    """How one checkpoint's weights are stored, loaded and multiplied, on one device and with one activation type.

    Attributes:
        name: the checkpoint's `quant_method`, or the option's value.
        converted: what `weights` does to stored weights that are not kept, in words, for `verify`'s report.
    """

    name: str
    converted: str

    def config(self, hf_config: Any) -> Any:
        """Return the configuration for transformers' loader."""

    def weights(self, path: Path) -> dict[str, Any] | None:
        """Return the weights of the checkpoint in `path` by name, unread; indexing one with `...` reads it.

        Weights that are not kept as stored are dequantized. None: transformers' loader reads the files itself.

        Raises:
            ModelError: the files are incomplete or inconsistent.
        """

    def loading(self, model_class: Any, weights: dict[str, Any]) -> Any:
        """Return a subclass of `model_class` with room for stored weights; may replace entries of `weights`."""

    def kept_as(self, parameter: Tensor, weights: Sequence[Any]) -> str | None:
        """Return how a parameter of a linear layer or experts is stored, if made of these weights; None if it is plain.

        Ranks read their part of a weight by its `rank_part(cut)`, and the whole if a part would be stored otherwise.

        Args:
            parameter: (..., N, K), perhaps on the meta device.
            weights: those of `weights`, or their parts; none for a model that is made without files.
        """

    def settle(self, model: Any, model_class: Any, text_of: TextOf, replace: Replace) -> None:
        """Replace layers by ones that multiply stored weights; the model is an instance of `model_class` afterwards.

        Args:
            text_of: finds the part of the model that holds the decoder layers.

        Raises:
            ModelError: the weights cannot be quantized.
        """

    def stored_bytes(
        self, path: Path, model: Any, text_of: TextOf, weights: Mapping[str, Any] | None = None
    ) -> int | None:
        """Return the weights' bytes on the device; None if they take as much as unquantized weights.

        Args:
            path: the checkpoint's folder.
            model: the unquantized model on the meta device.
            text_of: finds its part that holds the decoder layers.
            weights: those that the model holds, of `weights`, if it is a rank's or a stage's; None for a whole model.
        """


class Make(Protocol):
    """A function that makes the method for one checkpoint."""

    def __call__(self, stated: Mapping[str, Any], target: StorageTarget) -> QuantMethod:
        """Return the method for a checkpoint's quantization_config, `stated`.

        Raises:
            ModelError: names what is not supported.
        """
