"""Models made without modules whose results no answer needs, so that their weights are neither read nor kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from beheld.utils.named_as import named_as


class UnreadModule(nn.Module):
    """Takes the place of a module whose result is not needed; it has no weights."""

    def forward(self, *args: Any, **keywords: Any) -> None:
        """Return nothing, whatever it is given."""


def without(model_class: Any, names: Sequence[str]) -> Any:
    """Return a subclass of `model_class` whose models are made without modules of these names, wherever they are.

    A model lists the paths of the modules in `unread`. Returns the class itself if there are no names.

    Args:
        names: FamilyModel.unread. A module that has such a part in some layers, and None in others, has one in all.
    """
    if not names:
        return model_class

    class WithoutUnread(model_class):
        def __init__(self, config: Any, *args: Any, **keywords: Any) -> None:
            super().__init__(config, *args, **keywords)
            self.unread = _take_out(self, names)

    return named_as(WithoutUnread, model_class)


def _take_out(model: nn.Module, names: Sequence[str]) -> tuple[str, ...]:
    """Take all modules of these names out of a model; returns their paths."""
    found = [(path, owner, name) for path, owner in model.named_modules() for name in names if hasattr(owner, name)]
    for _, owner, name in found:
        setattr(owner, name, UnreadModule())
    return tuple(f"{path}.{name}" for path, _, name in found)
