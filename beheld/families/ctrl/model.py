"""CTRL names its decoder layers `h`."""

from __future__ import annotations

from typing import Any

from beheld.families.model import FamilyModel
from beheld.models.surgery.operation import Changes


def adapt(model: Any, changes: Changes) -> None:
    """Give the list of layers its usual name; see FamilyModel.adapt."""
    decoder = model.transformer
    # Not as a submodule: the layers' weights would be listed twice.
    vars(decoder)["layers"] = decoder.h
    changes.undo_with(lambda: vars(decoder).pop("layers"))


MODEL = FamilyModel(adapt=adapt)
