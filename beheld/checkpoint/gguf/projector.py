"""The file with a model's vision part (mmproj), which lies next to the GGUF file with its text model."""

from __future__ import annotations

import importlib
import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from beheld.checkpoint.gguf.config import is_vision_part
from beheld.checkpoint.gguf.header import SUFFIX, Header, read_header
from beheld.core.errors import ModelError
from beheld.families import registry
from beheld.families.family import GGUFProjector

_PATTERN = f"*mmproj*{SUFFIX}"
ADDED = "added tokens"
"""Of the files that a family makes, the list of tokens that the tokenizer has to have."""
_AGAIN = "Convert the model again, or fetch the file again."
_FIRST = "mlp"
_SWAPPED = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}


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

    def number(self, name: str, default: int | None = None) -> int:
        """Return a whole number from 1.

        Raises:
            ModelError: it is missing and has no default, or is no such number.
        """
        value = self.header.metadata.get(f"clip.{name}", default)
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

    def place(self, text: str) -> int:
        """Return the id of a token that stands for an embedding: the text model's, or the first after its vocabulary.

        Such a token needs no row in the embeddings. The tokenizer's files that are made of this one list it in ADDED.
        """
        tokens = list(self.text_said.get("tokenizer.ggml.tokens") or ())
        return tokens.index(text) if text in tokens else len(tokens)

    def refused(self, words: str) -> ModelError:
        """Return an error about the file."""
        return ModelError(f"{self.file.name}: {words}.", _AGAIN)


def vision_file_of(file: Path, named: str | None) -> Path | None:
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
    """Return the content of the checkpoint's files: config.json, those of the processor, what is added to
    tokenizer_config.json, and the tokens that are added, ADDED.

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
    # The first files were all of one kind, and do not name it.
    kind = _FIRST if kind is None and said.get("clip.has_llava_projector") is True else kind
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
    """Return transformers' names of the weights -> the file's, of slices and of what is joined in order."""
    order = list(projector.names)
    found: dict[str, dict[int, str]] = {}
    for name in header.tensors:
        known = _renamed(projector, header, name)
        if known is not None:
            found.setdefault(known.theirs, {})[order.index(known.pattern)] = name
    weights: dict[str, tuple[str, ...]] = {}
    for theirs, parts in found.items():
        first = parts[min(parts)]
        if first.rpartition(".")[0] in projector.stacked:
            further = (f"{first}.{number}" for number in range(1, len(header.tensors)))
            weights[theirs] = (first, *itertools.takewhile(header.tensors.__contains__, further))
        else:
            weights[theirs] = tuple(parts[place] for place in sorted(parts))
    return weights


def unknown_names(projector: GGUFProjector, header: Header) -> list[str]:
    """Return the names of weights that no such model has."""
    known = {name for names in weights_of(projector, header).values() for name in names}
    return sorted(header.tensors.keys() - known)


class _Renamed(NamedTuple):
    """A weight's name: transformers', and the one in GGUFProjector.names by which it was found."""

    theirs: str
    pattern: str


def _renamed(projector: GGUFProjector, header: Header, name: str) -> _Renamed | None:
    """Return transformers' name of a weight of the file; None if there is none."""
    if name in projector.names:
        return _Renamed(projector.names[name], name)
    stem, _, suffix = name.rpartition(".")
    if suffix not in ("weight", "bias"):
        return None
    if stem in projector.names:
        return _Renamed(f"{projector.names[stem]}.{suffix}", stem)
    if _is_swapped(header):
        before, _, last = stem.rpartition(".")
        stem = f"{before}.{_SWAPPED.get(last, last)}"
    place = re.fullmatch(r"(.*\.)(\d+)(\..*)?", stem)
    if place is None:
        return None
    before, number, after = place[1], int(place[2]), place[3] or ""
    pattern = f"{before}{{}}{after}"
    theirs = projector.names.get(pattern)
    if theirs is None:
        return None
    entry = next((entry for start, entry in projector.listed.items() if stem.startswith(start)), None)
    if entry is not None:
        truths = header.metadata.get(entry) or ()
        if number >= len(truths) or truths[number] is not True:
            return None
        number = sum(truths[:number])
    return _Renamed(f"{theirs.format(number)}.{suffix}", pattern)


def _is_swapped(header: Header) -> bool:
    """Return whether the file calls the first matrix of an MLP its second, as older converters do."""
    width, second = header.metadata.get("clip.vision.embedding_length"), header.tensors.get("v.blk.0.ffn_down.weight")
    return second is not None and second.shape[-1] == width != second.shape[0]
