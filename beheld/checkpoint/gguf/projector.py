"""The file with a model's vision part (mmproj), which lies next to the GGUF file with its text model."""

from __future__ import annotations

import importlib
import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from beheld.checkpoint.gguf.config import is_vision_part
from beheld.checkpoint.gguf.header import SUFFIX, Header, read_header
from beheld.core.errors import ModelError
from beheld.families import registry
from beheld.families.family import GGUFProjector

_PATTERN = f"*mmproj*{SUFFIX}"
_AGAIN = "Convert the model again, or fetch the file again."


@dataclass(frozen=True)
class ProjectorFile:
    """What such a file says, with what its text model needs of it.

    Attributes:
        file: where it is.
        header: of it.
        text_said: the metadata of the text model's file.
    """

    file: Path
    header: Header
    text_said: Mapping[str, Any]

    def number(self, name: str) -> int:
        """Return a whole number from 1.

        Raises:
            ModelError: it is missing, or no such number.
        """
        value = self.header.metadata.get(f"clip.{name}")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.refused(f"clip.{name} is {value!r}, and must be a whole number from 1")
        return value

    def colours(self, name: str) -> list[float]:
        """Return a number for each of three colours.

        Raises:
            ModelError: it is missing, or no such list.
        """
        value = self.header.metadata.get(f"clip.{name}")
        if not isinstance(value, list) or len(value) != 3 or not all(isinstance(each, float) for each in value):
            raise self.refused(f"clip.{name} is {value!r}, and must be three numbers")
        return value

    def token(self, text: str) -> int:
        """Return the id of a token.

        Raises:
            ModelError: the text model has none.
        """
        try:
            return list(self.text_said.get("tokenizer.ggml.tokens") or ()).index(text)
        except ValueError:
            raise ModelError(
                f"{self.file.name} needs the token {text!r}, which the text model does not have.",
                "Give the text model and the mmproj file of one model.",
            ) from None

    def refused(self, words: str) -> ModelError:
        """Return an error about the file."""
        return ModelError(f"{self.file.name}: {words}.", _AGAIN)


def beside(file: Path, named: str | None) -> Path | None:
    """Return the vision part's file: `named`, or the one next to `file` that is called mmproj; None if there is none.

    Raises:
        ModelError: the named one is not there, or several are next to the file.
    """
    if named == "":
        return None
    if named is not None:
        given = Path(named).expanduser()
        if not given.is_file():
            raise ModelError(f"There is no mmproj file {named!r}.", "Check the spelling.")
        return given.resolve()
    found = sorted(each for each in file.parent.glob(_PATTERN) if each.is_file() and each.resolve() != file)
    if len(found) > 1:
        names = ", ".join(each.name for each in found)
        raise ModelError(
            f"{len(found)} mmproj files are next to {file.name}: {names}.",
            "Name one with the option mmproj (--mmproj FILE), or none: mmproj=''.",
        )
    return found[0].resolve() if found else None


def files_of(file: Path, text_said: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of the checkpoint's files: config.json and those of the processor.

    Args:
        file: the vision part's.
        text_said: the metadata of the text model's file.
        text: the text model's config.json.

    Raises:
        ModelError: the file is broken, or its projector is unknown here.
    """
    header = read_header(file)
    projector = projector_of(header, file)
    unknown = unknown_names(projector, header)
    if unknown:
        raise ModelError(
            f"{file.name} has {len(unknown)} weights that no model of its kind has, such as {unknown[0]!r}.",
            "Use the model's checkpoint in transformers' layout instead.",
        )
    module, name = projector.files.split(":")
    make: Callable[[ProjectorFile, Mapping[str, Any]], dict[str, Any]] = getattr(
        importlib.import_module(f"{registry.gguf_projectors()[projector.projector]}.{module}"), name
    )
    return make(ProjectorFile(file, header, text_said), text)


def projector_of(header: Header, file: Path) -> GGUFProjector:
    """Return how the file is read.

    Raises:
        ModelError: nobody here knows its projector.
    """
    said = header.metadata
    kind = said.get("clip.projector_type") or said.get("clip.vision.projector_type")
    known = registry.gguf_projectors()
    if not is_vision_part(said) or kind not in known:
        raise ModelError(
            f"{file.name} holds a vision part of the kind {kind!r}; {', '.join(sorted(known))} can be run.",
            "Use the model's checkpoint in transformers' layout for images; for text alone, give mmproj=''.",
        )
    projector = registry.facts(known[str(kind)]).gguf_projector
    assert projector is not None
    return projector


def weights_of(projector: GGUFProjector, header: Header) -> dict[str, tuple[str, ...]]:
    """Return transformers' names of the weights -> the file's, of slices in order."""
    found: dict[str, tuple[str, ...]] = {}
    for name in header.tensors:
        theirs = _renamed(projector, header, name)
        if theirs is None:
            continue
        stem = name.rpartition(".")[0]
        further = (f"{name}.{number}" for number in range(1, len(header.tensors))) if stem in projector.stacked else ()
        found[theirs] = (name, *itertools.takewhile(header.tensors.__contains__, further))
    return found


def unknown_names(projector: GGUFProjector, header: Header) -> list[str]:
    """Return the names of weights that no such model has."""
    known = {name for names in weights_of(projector, header).values() for name in names}
    return sorted(header.tensors.keys() - known)


def _renamed(projector: GGUFProjector, header: Header, name: str) -> str | None:
    """Return transformers' name of a weight of the file; None if there is none."""
    stem, _, suffix = name.rpartition(".")
    if suffix not in ("weight", "bias"):
        return None
    if stem in projector.names:
        return f"{projector.names[stem]}.{suffix}"
    place = re.fullmatch(r"(.*\.)(\d+)(\..*)?", stem)
    if place is None:
        return None
    before, number, after = place[1], int(place[2]), place[3] or ""
    theirs = projector.names.get(f"{before}{{}}{after}")
    if theirs is None:
        return None
    entry = next((entry for start, entry in projector.listed.items() if stem.startswith(start)), None)
    if entry is not None:
        truths = header.metadata.get(entry) or ()
        if number >= len(truths) or truths[number] is not True:
            return None
        number = sum(truths[:number])
    return f"{theirs.format(number)}.{suffix}"
