"""The list of families: finds a family's folder by model type, architecture or processor class.

The folders are the list. A family's facts are imported at its first look-up, each other section on first use. A family
is identified by its package, "beheld.families.llava"; "" means none, with the defaults.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from beheld.families.family import Family, PublisherLayout, ShortName

if TYPE_CHECKING:
    from beheld.families.inputs import FamilyInputs
    from beheld.families.model import FamilyModel

_PACKAGE = "beheld.families"
_PLAIN = Family()
# Families outside this folder: a user's, or a test's.
_registered: list[str] = []


@contextmanager
def registered(package: str) -> Iterator[None]:
    """Register the family in `package`, before all others, within the context."""
    _registered.insert(0, package)
    families.cache_clear()
    try:
        yield
    finally:
        _registered.remove(package)
        families.cache_clear()


@cache
def families() -> Mapping[str, Family]:
    """Return the facts of all families, by package."""
    # Not by pkgutil, which lists the files of each folder.
    folders = sorted(found.name for found in os.scandir(Path(__file__).parent) if Path(found, "__init__.py").is_file())
    packages = [*_registered, *(f"{_PACKAGE}.{folder}" for folder in folders if not folder.startswith("_"))]
    return {package: facts(package) for package in packages}


def short_names() -> dict[str, ShortName]:
    """Return the short names of public checkpoints, the smallest first."""
    found = (each for family in families().values() for each in family.short_names)
    return {each.name: each for each in sorted(found, key=lambda each: (each.billions, each.name))}


def find(model_type: str | None, architectures: Collection[str] = (), processors: Collection[str] = ()) -> str:
    """Return the package of the family that these names belong to; "" if it has no folder.

    The processor's class decides first, where several families share a model type; then the architecture, then the
    model type.
    """
    known = families()
    for package, family in known.items():
        if model_type in family.model_types and not set(processors).isdisjoint(family.processors):
            return package
    for package, family in known.items():
        if not set(architectures).isdisjoint(family.architectures):
            return package
    for package, family in known.items():
        if model_type in family.model_types and not family.processors:
            return package
    return ""


def facts(package: str) -> Family:
    """Return the facts of a family."""
    if not package:
        return _PLAIN
    family: Family = importlib.import_module(package).FAMILY
    return family


def gguf_projectors() -> dict[str, str]:
    """Return the families whose vision part is read from GGUF files, by the files' name of the projector."""
    return {
        family.gguf_projector.projector: package
        for package, family in families().items()
        if family.gguf_projector is not None
    }


@cache
def inputs(package: str) -> FamilyInputs:
    """Return how a family's prompts and media are prepared."""
    from beheld.families.inputs import FamilyInputs

    section: FamilyInputs | None = _section(package, "inputs", "INPUTS")
    return FamilyInputs() if section is None else section


def inputs_of(package: str, folder: Path) -> FamilyInputs:
    """Return how the prompts and media of the checkpoint in a folder are prepared."""
    usual = inputs(package)
    return usual if usual.variant is None else usual.variant(folder)


@cache
def model(package: str) -> FamilyModel:
    """Return how a family's model runs."""
    from beheld.families.model import FamilyModel

    section: FamilyModel | None = _section(package, "model", "MODEL")
    return FamilyModel() if section is None else section


def further_template(name: str) -> Path | None:
    """Return a chat template that a family brings for another use of its model, by its file's name; else None.

    Its name begins with "template_".
    """
    if not name.startswith("template_") or Path(name).name != name:
        return None
    return next(iter(sorted(Path(__file__).parent.glob(f"*/{name}"))), None)


def own_class(package: str, part: str) -> Any:
    """Return the family's class for `part`, "config" or "model"; None if transformers defines it."""
    definition = facts(package).definition
    if definition is None:
        return None
    module, name = getattr(definition, part).split(":")
    return getattr(importlib.import_module(f"{package}.{module}"), name)


@cache
def layouts() -> dict[str, tuple[str, PublisherLayout]]:
    """Return publishers' layouts by their names in options, each with its family."""
    return {family.layout.name: (package, family.layout) for package, family in families().items() if family.layout}


def layout_files(name: str, folder: Path) -> dict[str, Any]:
    """Return the files of the folder that is read in place of a checkpoint's in this layout; see PublisherLayout."""
    package, layout = layouts()[name]
    module, function = layout.describe.split(":")
    made: dict[str, Any] = getattr(importlib.import_module(f"{package}.{module}"), function)(folder)
    return made


def _section(package: str, file: str, name: str) -> Any:
    if not package or importlib.util.find_spec(f"{package}.{file}") is None:
        return None
    return getattr(importlib.import_module(f"{package}.{file}"), name)
