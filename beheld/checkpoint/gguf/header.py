"""The header of a GGUF file: metadata, and where each tensor lies. Strangers wrote it, so every count is bounded.

    "GGUF" | version u32 | tensors u64 | entries u64 | entries | table of tensors | padding | numbers

An entry is a name, the number of a type, and a value; strings and arrays begin with their length.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from beheld.core.errors import ModelError

MAGIC = b"GGUF"
SUFFIX = ".gguf"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
# The numbers of types of fixed size -> their format.
_FORMATS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_MOST_ENTRIES = 1 << 16
_MOST_ELEMENTS = 1 << 22
_MOST_DIMENSIONS = 4
_DEFAULT_ALIGNMENT = 32
_AGAIN = "Fetch the file again."


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the file.

    Attributes:
        shape: as torch says it, the last dimension is the one whose numbers lie next to each other.
        kind: the type's name, such as "Q4_K".
        start, num_bytes: its place in the file.
    """

    shape: tuple[int, ...]
    kind: str
    start: int
    num_bytes: int


@dataclass(frozen=True)
class Header:
    """What a GGUF file says.

    Attributes:
        metadata: entries by name; arrays are lists.
        tensors: by the file's own names.
    """

    metadata: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]


def is_gguf(file: Path) -> bool:
    """Return whether a file is, or is called, a GGUF file."""
    if file.suffix.lower() == SUFFIX:
        return True
    with file.open("rb") as opened:
        return opened.read(len(MAGIC)) == MAGIC


def read_header(file: Path) -> Header:
    """Read a file's header, and check that all of its tensors are there.

    Raises:
        ModelError: the package that knows the types is not installed, or the file is broken or cut short.
    """
    if find_spec("gguf") is None:
        raise ModelError("GGUF files need the package gguf, which is not installed.", "Install it: pip install gguf")
    size = file.stat().st_size
    if size < 24:
        raise _broken(file, "it is too short to be a GGUF file")
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            return _HeaderReader(data, file, size).header()
        except struct.error as error:
            raise _broken(file, "it ends within its header") from error
        except UnicodeDecodeError as error:
            raise _broken(file, "a text in its header is not UTF-8") from error


def _broken(file: Path, why: str, remedy: str = _AGAIN) -> ModelError:
    return ModelError(f"{file.name} cannot be read: {why}.", remedy)


class _HeaderReader:
    """Reads one header from start to end."""

    def __init__(self, data: mmap.mmap, file: Path, size: int) -> None:
        self._data, self._file, self._size = data, file, size
        self._place = 0

    def header(self) -> Header:
        if self._data[:4] != MAGIC:
            raise _broken(self._file, "it does not begin as a GGUF file does")
        self._place = 4
        version = self._number("I")
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            said = "its numbers are big-endian" if swapped in _VERSIONS else f"its version is {version}"
            raise _broken(self._file, said, "Convert the model again: versions 2 and 3, little-endian, can be read.")
        tensors, entries = self._number("Q"), self._number("Q")
        if max(tensors, entries) > _MOST_ENTRIES:
            raise _broken(self._file, f"it claims {tensors} tensors and {entries} entries")
        metadata: dict[str, Any] = {}
        for _ in range(entries):
            name = self._string()
            if name in metadata:
                raise _broken(self._file, f"it has {name!r} twice")
            metadata[name] = self._value(self._number("I"), name)
        return Header(metadata, self._tensors(tensors, metadata))

    def _number(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._data, self._place)
        self._place += struct.calcsize("<" + code)
        return value

    def _string(self) -> str:
        length = self._number("Q")
        start = self._place
        if length > self._size - start:
            raise _broken(self._file, "it ends within its header")
        self._place += length
        return self._data[start : self._place].decode()

    def _value(self, kind: int, name: str) -> Any:
        if kind in _FORMATS:
            return self._number(_FORMATS[kind])
        if kind == _STRING:
            return self._string()
        inner, count = (self._number("I"), self._number("Q")) if kind == _ARRAY else (None, 0)
        if inner not in _FORMATS and inner != _STRING:
            raise _broken(self._file, f"{name!r} is of an unknown type")
        width = 8 if inner == _STRING else struct.calcsize("<" + _FORMATS[inner])
        if count > _MOST_ELEMENTS:
            raise _broken(self._file, f"{name!r} claims {count} elements")
        if count * width > self._size - self._place:
            raise _broken(self._file, "it ends within its header")
        if inner == _STRING:
            return [self._string() for _ in range(count)]
        values = struct.unpack_from(f"<{count}{_FORMATS[inner]}", self._data, self._place)
        self._place += count * width
        return list(values)

    def _tensors(self, count: int, metadata: Mapping[str, Any]) -> dict[str, StoredTensor]:
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise _broken(self._file, f"its alignment is {alignment!r}")
        entries = []
        for _ in range(count):
            name, dimensions = self._string(), self._number("I")
            if dimensions > _MOST_DIMENSIONS:
                raise _broken(self._file, f"{name!r} has {dimensions} dimensions")
            shape = tuple(reversed([self._number("Q") for _ in range(dimensions)]))
            entries.append((name, shape, self._number("I"), self._number("Q")))
        first = -(-self._place // alignment) * alignment
        found: dict[str, StoredTensor] = {}
        for name, shape, number, offset in entries:
            if name in found:
                raise _broken(self._file, f"it has {name!r} twice")
            kind, num_bytes = self._kind(name, shape, number)
            found[name] = StoredTensor(shape, kind, first + offset, num_bytes)
        end = max((each.start + each.num_bytes for each in found.values()), default=0)
        if end > self._size:
            raise _broken(self._file, f"it is cut short: {end - self._size} of its {end} bytes are missing")
        return found

    def _kind(self, name: str, shape: tuple[int, ...], number: int) -> tuple[str, int]:
        """Return the name of a tensor's type, and its bytes."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            kind = GGMLQuantizationType(number)
            block, block_bytes = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError) as error:
            raise _broken(
                self._file,
                f"{name!r} is of the type {number}, which the package gguf does not know",
                "Update it (pip install --upgrade gguf), or use another quantization of the model.",
            ) from error
        if not _is_dequantized(number):
            raise _broken(
                self._file,
                f"{name!r} is of the type {kind.name}, which cannot be dequantized",
                "Use another quantization of the model, such as Q4_K_M or Q8_0.",
            )
        if not shape or not all(shape) or shape[-1] % block:
            raise _broken(self._file, f"{name!r} has the shape {list(shape)}, and {kind.name} holds {block} at a time")
        return kind.name, math.prod(shape) // block * block_bytes


@cache
def _is_dequantized(number: int) -> bool:
    """Return whether the package gguf dequantizes a type; it has no list of those."""
    import numpy as np
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    kind = GGMLQuantizationType(number)
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True
