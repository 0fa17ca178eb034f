"""Messages as bytes and back, without pickle: JSON that names known classes, followed by raw buffers.

    body     length of the JSON (8 bytes) | JSON | gap | buffer 0 | gap | buffer 1 | ...
    JSON     {"value": ..., "sizes": [bytes of each buffer]}

Every buffer begins at a multiple of 64 bytes, so that arrays and tensors can use the received memory. Plain JSON values
encode as themselves; other values encode as an object with one key that names their type. Only the classes in a codec's
table are accepted, and their own constructors build them.
"""

from __future__ import annotations

import json
import struct
import sys
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import StrEnum
from typing import Any

from beheld.core import errors
from beheld.core.errors import BeheldError, ConfigError

_LENGTH = struct.Struct("<Q")
_encoded = json.JSONEncoder(separators=(",", ":")).encode
_ALIGN = 64
_ERRORS: dict[str, type[BeheldError]] = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, BeheldError)
}
# A list of plain numbers of at least this length is sent as a buffer: entry by entry it would take milliseconds.
_ROW = 16
# JSON's scalar types, and its containers, by exact type: most values are scalars.
_PLAIN = frozenset({type(None), bool, int, float, str})
_NESTED = frozenset({list, dict})
# Kinds of numpy's data types in which every bit pattern is a value.
_NUMBERS = "biuf"
_DTYPES = ("float32", "float16", "bfloat16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool")

Buffer = bytes | memoryview


class Encoded:
    """A value that a codec has serialized, to be sent several times."""

    def __init__(self, pieces: list[Buffer]) -> None:
        self.pieces = pieces


class Codec:
    """Serializes values and deserializes them.

    Args:
        classes: the dataclasses, named tuples and enumerations that messages may contain.
    """

    def __init__(self, classes: Iterable[type]) -> None:
        self._classes = {kind.__name__: kind for kind in classes}
        # Cached: `dataclasses.fields` builds its tuple at every call, and every value needs it.
        self._fields = {
            kind: tuple(field.name for field in fields(kind)) if is_dataclass(kind) else vars(kind)["_fields"]
            for kind in self._classes.values()
            if is_dataclass(kind) or issubclass(kind, tuple)
        }

    def encode(self, value: Any) -> list[Buffer]:
        """Serialize a value, unless it is Encoded, into the pieces of a body, to be sent one after another.

        Raises:
            ConfigError: the value contains something that cannot leave the process, such as a function.
        """
        if type(value) is Encoded:
            return value.pieces
        buffers: list[Buffer] = []
        made = self._plain(value, buffers)
        head = _encoded({"value": made, "sizes": [len(buffer) for buffer in buffers]}).encode()
        pieces: list[Buffer] = [_LENGTH.pack(len(head)), head]
        end = _LENGTH.size + len(head)
        for buffer in buffers:
            gap = -end % _ALIGN
            pieces += [b"\0" * gap, buffer]
            end += gap + len(buffer)
        return pieces

    def decode(self, body: Any) -> Any:
        """Deserialize a body. Arrays and tensors use the body's own memory if it is writable.

        Raises:
            ValueError: the body is malformed.
        """
        view = memoryview(body)
        if view.readonly:
            view = memoryview(bytearray(view))
        try:
            (size,) = _LENGTH.unpack_from(view)
            head = json.loads(bytes(view[_LENGTH.size : _LENGTH.size + size]))
            end = _LENGTH.size + size
            buffers = []
            for length in head["sizes"]:
                start = end + -end % _ALIGN
                if length < 0 or start + length > len(view):
                    raise ValueError("a buffer is outside the frame")
                buffers.append(view[start : start + length])
                end = start + length
            return self._value(head["value"], buffers)
        except (KeyError, IndexError, TypeError, struct.error, RecursionError) as error:
            raise ValueError("the frame is malformed") from error

    def _plain(self, value: Any, buffers: list[Buffer]) -> Any:
        if type(value) in _PLAIN:
            return value
        names = self._fields.get(type(value))
        if names is not None:
            return {"class": [type(value).__name__, self._all_plain([getattr(value, name) for name in names], buffers)]}
        if isinstance(value, StrEnum):
            if type(value).__name__ not in self._classes:
                # As a text it would arrive without its methods.
                raise ConfigError(f"A {type(value).__name__} cannot leave the process; its class is not in the codec.")
            return {"enum": [type(value).__name__, str(value)]}
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, bytes):
            buffers.append(value)
            return {"bytes": len(buffers) - 1}
        if isinstance(value, list | tuple) and len(value) >= _ROW:
            row = _row(value, buffers)
            if row is not None:
                return row
        if isinstance(value, list):
            return self._all_plain(value, buffers)
        if isinstance(value, tuple | frozenset):
            return {"tuple" if isinstance(value, tuple) else "set": self._all_plain(value, buffers)}
        if isinstance(value, Mapping):
            return {"map": [[self._plain(k, buffers), self._plain(v, buffers)] for k, v in value.items()]}
        if isinstance(value, BeheldError):
            return {"error": [type(value).__name__, *value.arguments()]}
        return _numbers(value, buffers)

    def _all_plain(self, values: Iterable[Any], buffers: list[Buffer]) -> list[Any]:
        return [value if type(value) in _PLAIN else self._plain(value, buffers) for value in values]

    def _value(self, made: Any, buffers: list[memoryview]) -> Any:
        if isinstance(made, list):
            return self._all(made, buffers)
        if not isinstance(made, dict):
            return made
        ((kind, inner),) = made.items()
        if kind == "tuple":
            return tuple(self._all(inner, buffers))
        if kind == "row":
            return _from_row(inner, buffers)
        if kind == "words":
            return _from_words(*inner)
        if kind == "set":
            return frozenset(self._all(inner, buffers))
        if kind == "map":
            return {self._value(k, buffers): self._value(v, buffers) for k, v in inner}
        if kind == "bytes":
            return bytes(buffers[inner])
        if kind == "enum":
            name, word = inner
            return self._classes[name](word)
        if kind == "tensor":
            dtype, shape, index = inner
            return _to_tensor(dtype, shape, buffers[index])
        if kind == "array":
            dtype, shape, index = inner
            return _to_array(dtype, shape, buffers[index])
        if kind == "error":
            name, *arguments = inner
            return errors.rebuild(_ERRORS[name], *arguments)
        if kind == "class":
            name, own = inner
            return self._build(name, own, buffers)
        raise ValueError(f"there is no {kind!r}")

    def _all(self, made: Iterable[Any], buffers: list[memoryview]) -> list[Any]:
        return [self._value(entry, buffers) if type(entry) in _NESTED else entry for entry in made]

    def _build(self, name: str, own: list[Any], buffers: list[memoryview]) -> Any:
        known: Any = self._classes[name]
        names = self._fields[known]
        if len(names) != len(own):
            raise ValueError(f"{name} has {len(names)} fields, not {len(own)}")
        return known(**dict(zip(names, self._all(own, buffers), strict=True)))


def _row(value: list[Any] | tuple[Any, ...], buffers: list[Buffer]) -> Any:
    """A long list or tuple: texts as a list, integers or booleans as a buffer; None for other or mixed entries."""
    kinds = set(map(type, value))
    if kinds == {str}:
        return {"words": [type(value).__name__, list(value)]}
    if kinds == {int}:
        try:
            buffers.append(memoryview(array("q", value)).cast("B"))
        except OverflowError:
            return None
    elif kinds == {bool}:
        buffers.append(bytes(value))
    else:
        return None
    return {"row": [type(value).__name__, kinds.pop().__name__, len(buffers) - 1]}


def _from_words(outer: str, words: list[str]) -> list[str] | tuple[str, ...]:
    if outer not in ("list", "tuple") or not isinstance(words, list) or set(map(type, words)) != {str}:
        raise ValueError("a row of texts has an entry that is not a text")
    return words if outer == "list" else tuple(words)


def _from_row(made: list[Any], buffers: list[memoryview]) -> list[Any] | tuple[Any, ...]:
    outer, inner, index = made
    if outer not in ("list", "tuple") or inner not in ("int", "bool"):
        raise ValueError(f"there is no {outer!r} of {inner!r}")
    buffer = buffers[index]
    if inner == "int" and len(buffer) % 8:
        raise ValueError("a row of integers is truncated")
    entries = buffer.cast("q").tolist() if inner == "int" else list(map(bool, buffer))
    return entries if outer == "list" else tuple(entries)


def _numbers(value: Any, buffers: list[Buffer]) -> Any:
    """Arrays, tensors and numpy scalars; imports neither numpy nor torch."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        dtype, shape, buffer = _tensor_parts(value)
        buffers.append(buffer)
        return {"tensor": [dtype, shape, len(buffers) - 1]}
    if numpy is not None and isinstance(value, numpy.generic):
        return value.item()
    if numpy is not None and isinstance(value, numpy.ndarray) and value.dtype.kind in _NUMBERS:
        buffers.append(memoryview(numpy.ascontiguousarray(value).reshape(-1).view(numpy.uint8)))
        return {"array": [value.dtype.str, list(value.shape), len(buffers) - 1]}
    raise ConfigError(
        f"A {type(value).__name__} cannot be sent to another process.",
        "Run the work in this process (the engine in a thread, media_workers=0), or leave it out.",
    )


def _to_array(dtype: str, shape: list[int], buffer: memoryview) -> Any:
    import numpy

    kind = numpy.dtype(dtype)
    if kind.kind not in _NUMBERS or kind.names is not None:
        raise ValueError(f"an array cannot hold {dtype!r}")
    if _count(shape) * kind.itemsize != len(buffer):
        raise ValueError("an array's shape does not fit its buffer")
    return numpy.frombuffer(buffer, dtype=kind).reshape(shape)


def _tensor_parts(tensor: Any) -> tuple[str, list[int], memoryview]:
    """Data type, shape and bytes of a tensor in host memory; the bytes are a view if the tensor is contiguous."""
    import torch

    dtype = str(tensor.dtype).removeprefix("torch.")
    try:
        if dtype not in _DTYPES:
            raise TypeError(dtype)
        # numpy sees the memory of a CPU tensor.
        array = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    except (TypeError, RuntimeError) as error:
        reason = f"A tensor of {dtype} on {tensor.device} cannot be sent to another process."
        raise ConfigError(reason) from error
    return dtype, list(tensor.shape), memoryview(array)


def _to_tensor(name: str, shape: list[int], buffer: memoryview) -> Any:
    import torch

    if name not in _DTYPES:
        raise ValueError(f"a tensor cannot hold {name!r}")
    dtype: torch.dtype = getattr(torch, name)
    count = _count(shape)
    if count * dtype.itemsize != len(buffer):
        raise ValueError("a tensor's shape does not fit its buffer")
    return torch.frombuffer(buffer, dtype=dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


def _count(shape: list[int]) -> int:
    """The number of entries of an array of this shape; ValueError if the shape is malformed."""
    count = 1
    for size in shape:
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise ValueError("this is not a shape")
        count *= size
    return count
