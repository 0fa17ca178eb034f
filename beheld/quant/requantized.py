"""Weights that one method dequantizes as they are read, and another quantizes as they are loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from beheld.quant.method import QuantMethod, Replace, TextOf


class Requantized:
    """See QuantMethod.

    Args:
        read: the method of the checkpoint, which keeps nothing as stored.
        at_load: the method of the option `quantization`.
    """

    def __init__(self, read: QuantMethod, at_load: QuantMethod) -> None:
        self._read, self._at_load = read, at_load
        self.name = at_load.name
        self.converted = read.converted

    def config(self, hf_config: Any) -> Any:
        """Return the configuration as both methods want it."""
        return self._at_load.config(self._read.config(hf_config))

    def weights(self, path: Path) -> dict[str, Any] | None:
        """Return the weights, dequantized when they are read."""
        return self._read.weights(path)

    def loading(self, model_class: Any, weights: dict[str, Any]) -> Any:
        """Return the class that the second method makes of it: the first one keeps nothing."""
        return self._at_load.loading(model_class, weights)

    def kept_as(self, parameter: Tensor, weights: Sequence[Any]) -> str | None:
        """Return what the second method makes of them."""
        return self._at_load.kept_as(parameter, weights)

    def settle(self, model: Any, model_class: Any, text_of: TextOf, replace: Replace) -> None:
        """Quantize the layers."""
        self._at_load.settle(model, model_class, text_of, replace)

    def stored_bytes(
        self, path: Path, model: Any, text_of: TextOf, weights: Mapping[str, Any] | None = None
    ) -> int | None:
        """Return the bytes after loading."""
        return self._at_load.stored_bytes(path, model, text_of, weights)
