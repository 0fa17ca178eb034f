"""Which modules serve which kind of media, and models made without the modules of disabled kinds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import nn

from beheld.utils.named_as import named_as

# The module between towers and text, which every kind of media passes.
_BRIDGES = ("multi_modal_projector", "qformer", "language_projection", "resampler_model", "connector")


class DisabledTower(nn.Module):
    """Takes the place of a disabled tower; it has no weights.

    Attributes:
        device: "meta"; Qwen2-Audio asks its tower for its device in every pass.
        layers: none; some families change those of their tower.
    """

    device = torch.device("meta")
    layers: tuple[nn.Module, ...] = ()

    def forward(self, *args: Any, **keywords: Any) -> NoReturn:
        """Never called: requests with its media are refused earlier."""
        raise AssertionError("a disabled tower was called")


def parts_of(model: Any, own: Mapping[str, tuple[str, ...]], kind: str) -> set[str]:
    """Return the names of modules that media of this kind pass before the text model.

    Args:
        own: the names per kind, FamilyModel.towers.
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
    """Return the names of modules that serve only disabled kinds of media.

    Args:
        own: FamilyModel.towers.
        limits: the largest number per request, for each kind that the family accepts.
    """
    idle: set[str] = set()
    used: set[str] = set()
    for kind, limit in limits.items():
        (used if limit else idle).update(parts_of(model, own, kind))
    return tuple(sorted(idle - used))


def without(model_class: Any, own: Mapping[str, tuple[str, ...]], limits: Mapping[str, int]) -> Any:
    """Return a subclass of `model_class` whose models are made without the towers of disabled kinds.

    A model lists the module names in `left_out`. Returns the class itself if no kind is disabled.
    """
    if all(limits.values()):
        return model_class

    class Without(model_class):
        def __init__(self, config: Any, *args: Any, **keywords: Any) -> None:
            super().__init__(config, *args, **keywords)
            self.left_out = switched_off(self, own, limits)
            for name in self.left_out:
                self.set_submodule(name, DisabledTower())

    return named_as(Without, model_class)


def belongs(key: str, parts: Iterable[str]) -> bool:
    """Return whether the weight `key` is in one of these modules."""
    return key.startswith(tuple(f"{part}." for part in parts))
