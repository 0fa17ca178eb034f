"""ModelRegistry as scripts ask it: which architectures run here."""

from __future__ import annotations

from typing import Any

from beheld.core.errors import ConfigError
from beheld.families import registry


class ModelRegistry:
    """The architectures that run; none is added while a script runs."""

    @staticmethod
    def get_supported_archs() -> set[str]:
        """The names of architectures that families state, or that were tested."""
        known = registry.families().values()
        return {name for family in known for name in family.architectures} | {
            row.architecture for family in known for row in family.tested
        }

    @staticmethod
    def register_model(model_arch: str, model_cls: Any) -> None:
        """Refused.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"Classes of vLLM's models, such as that of {model_arch!r}, do not run here.",
            "Add the model as a family: docs/how-to/add-a-model.md.",
            param="model_cls",
        )
