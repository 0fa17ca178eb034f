"""The only list of families: from a model type, an architecture or a processor class to a folder.

The folders are the list. Their facts are read when a family is first looked up, their other sections when that section
is first asked for. A family is named by its package, "beheld.families.llava"; "" names none, and has the defaults.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from beheld.families.family import Family

if TYPE_CHECKING:
    from beheld.families.inputs import FamilyInputs
    from beheld.families.model import FamilyModel

_PACKAGE = "beheld.families"
_PLAIN = Family()
# Families that live elsewhere: a user's own, or a test's.
_registered: list[str] = []


@contextmanager
def registered(package: str) -> Iterator[None]:
    """Know the family in `package` as well, before all others, as long as the context lasts."""
    _registered.insert(0, package)
    families.cache_clear()
    try:
        yield
    finally:
        _registered.remove(package)
        families.cache_clear()


@cache
def families() -> Mapping[str, Family]:
    """Package -> facts, of all families."""
    import beheld.families

    folders = sorted(found.name for found in pkgutil.iter_modules(beheld.families.__path__) if found.ispkg)
    packages = [*_registered, *(f"{_PACKAGE}.{folder}" for folder in folders if not folder.startswith("_"))]
    return {package: facts(package) for package in packages}


def find(model_type: str | None, architectures: Collection[str] = (), processors: Collection[str] = ()) -> str:
    """The package of the family that these names belong to; "" if it has no folder.

    A processor's name says most, where several families share a model type; then the architecture, then the model type.
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
    """The facts of a family."""
    if not package:
        return _PLAIN
    family: Family = importlib.import_module(package).FAMILY
    return family


@cache
def inputs(package: str) -> FamilyInputs:
    """How a family's prompts and media are prepared."""
    from beheld.families.inputs import FamilyInputs

    section: FamilyInputs | None = _section(package, "inputs", "INPUTS")
    return FamilyInputs() if section is None else section


@cache
def model(package: str) -> FamilyModel:
    """How a family's model is run."""
    from beheld.families.model import FamilyModel

    section: FamilyModel | None = _section(package, "model", "MODEL")
    return FamilyModel() if section is None else section


def own_class(package: str, part: str) -> Any:
    """The family's own class for `part`, "config" or "model"; None if transformers defines it."""
    definition = facts(package).definition
    if definition is None:
        return None
    module, name = getattr(definition, part).split(":")
    return getattr(importlib.import_module(f"{package}.{module}"), name)


def _section(package: str, file: str, name: str) -> Any:
    if not package or importlib.util.find_spec(f"{package}.{file}") is None:
        return None
    return getattr(importlib.import_module(f"{package}.{file}"), name)
