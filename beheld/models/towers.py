"""Which parts of a model serve which kind of media, and a model that is made without those that are switched off."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import nn

# What stands between towers and text, wherever a model has it; every kind of media that the family takes passes it.
_BRIDGES = ("multi_modal_projector", "qformer", "language_projection", "resampler_model", "connector")


class LeftOut(nn.Module):
    """Stands where a tower would, and holds nothing.

    Attributes:
        device: where nothing lies; Qwen2-Audio asks its tower for one in every pass.
    """

    device = torch.device("meta")

    def forward(self, *args: Any, **keywords: Any) -> NoReturn:
        """Never called: its media are refused before they are prepared."""
        raise AssertionError("a tower that was left out was called")


def parts_of(model: Any, own: Mapping[str, tuple[str, ...]], kind: str) -> set[str]:
    """Names of the modules of `model` that media of this kind pass before the text model.

    Args:
        own: those of each kind, as FamilyModel.towers has them.
    """
    if own:
        return set(own.get(kind, ()))
    encoder = model.get_encoder(kind)
    core = getattr(model, "model", model)
    wanted = [getattr(core, name, None) for name in _BRIDGES]
    if encoder is not model and encoder is not core:
        wanted.append(encoder)
    return {name for name, module in model.named_modules() if any(module is each for each in wanted)}


def switched_off(model: Any, own: Mapping[str, tuple[str, ...]], limits: Mapping[str, int]) -> tuple[str, ...]:
    """Names of the modules that serve only kinds of media of which a request may hold none.

    Args:
        own: as FamilyModel.towers.
        limits: of each kind that the family takes, how many a request may hold.
    """
    idle: set[str] = set()
    used: set[str] = set()
    for kind, limit in limits.items():
        (used if limit else idle).update(parts_of(model, own, kind))
    return tuple(sorted(idle - used))


def without(model_class: Any, own: Mapping[str, tuple[str, ...]], limits: Mapping[str, int]) -> Any:
    """A class like `model_class` whose models are made without the towers that are switched off.

    They say which in `left_out`: names of modules. The same class if no kind is switched off.
    """
    if all(limits.values()):
        return model_class

    class Without(model_class):
        def __init__(self, config: Any, *args: Any, **keywords: Any) -> None:
            super().__init__(config, *args, **keywords)
            self.left_out = switched_off(self, own, limits)
            for name in self.left_out:
                self.set_submodule(name, LeftOut())

    # The loader chooses what to rename by the name of the class, and by where it comes from.
    Without.__name__, Without.__qualname__ = model_class.__name__, model_class.__qualname__
    Without.__module__ = model_class.__module__
    return Without


def belongs(key: str, parts: Iterable[str]) -> bool:
    """True if the weight `key` lies in one of these modules."""
    return key.startswith(tuple(f"{part}." for part in parts))
