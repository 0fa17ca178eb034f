"""The method of weights that are stored as they are computed: transformers' loader does it all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from beheld.quant.method import Replace


class Unquantized:
    """See QuantMethod; layers are plain `nn.Linear`, of which linear.py knows how they are joined and cut."""

    name = "none"
    converted = ""

    def config(self, hf_config: Any) -> Any:
        """As it is."""
        return hf_config

    def weights(self, path: Path) -> dict[str, Any] | None:
        """None: the loader reads the files itself."""
        return None

    def loading(self, model_class: Any, weights: dict[str, Any]) -> Any:
        """The class itself."""
        return model_class

    def settle(self, model: Any, model_class: Any, replace: Replace) -> None:
        """Nothing is left to do."""

    def stored_bytes(self, path: Path) -> int | None:
        """As many as the numbers take."""
        return None
