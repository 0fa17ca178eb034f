"""The method for unquantized weights: transformers' loader does everything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from beheld.quant.method import Replace, TextOf


class Unquantized:
    """See QuantMethod; layers are plain `nn.Linear`, which linear.py joins and cuts."""

    name = "none"
    converted = ""

    def config(self, hf_config: Any) -> Any:
        """Return the configuration unchanged."""
        return hf_config

    def weights(self, path: Path) -> dict[str, Any] | None:
        """Return None: the loader reads the files itself."""
        return None

    def loading(self, model_class: Any, weights: dict[str, Any]) -> Any:
        """Return the class unchanged."""
        return model_class

    def kept_as(self, parameter: Tensor, weights: Sequence[Any]) -> str | None:
        """Return None: all are plain."""
        return None

    def settle(self, model: Any, model_class: Any, text_of: TextOf, replace: Replace) -> None:
        """Do nothing."""

    def stored_bytes(
        self, path: Path, model: Any, text_of: TextOf, weights: Mapping[str, Any] | None = None
    ) -> int | None:
        """Return None: weights take what their numbers take."""
        return None
