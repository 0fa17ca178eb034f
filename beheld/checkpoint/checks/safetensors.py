"""Headers of safetensors files and the index of shards, read without the weights."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from beheld.checkpoint.weights import weight_files
from beheld.core.errors import ModelError

_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
}
"""Type -> bits of one number."""
_MAX_HEADER = 100_000_000
_REMEDY = "Fetch this file again."


def count_numbers(path: Path) -> int:
    """How many numbers the safetensors files that a loader will read from the folder `path` hold, by their headers,
    which are checked; 0 if the weights are of another format.

    Raises:
        ModelError: it names the file and the weight.
    """
    count = 0
    for name in weight_files(path):
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ModelError(f"The index of weights names {name!r}, which is outside the checkpoint.", _REMEDY)
        if name.endswith(".safetensors"):
            count += _numbers(path / name)
    return count


def shapes_of(file: Path) -> dict[str, tuple[int, ...]]:
    """Return the weights of a safetensors file and their shapes, by its header.

    Raises:
        ModelError: it cannot be read.
    """
    header, _ = _header(file)
    entries = {key: entry.get("shape") for key, entry in header.items() if isinstance(entry, dict)}
    return {key: tuple(shape) for key, shape in entries.items() if isinstance(shape, list)}


def _numbers(file: Path) -> int:
    header, data = _header(file)
    return sum(_count(file, key, entry, data) for key, entry in header.items() if key != "__metadata__")


def _header(file: Path) -> tuple[dict[str, Any], int]:
    """Return the header, and how many bytes follow it."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 or length > min(_MAX_HEADER, size - 8):
            raise ModelError(f"{file.name} is cut short, or is no safetensors file.", _REMEDY)
        try:
            header = json.loads(opened.read(length))
        except (ValueError, RecursionError) as error:
            raise ModelError(f"The header of {file.name} cannot be read.", _REMEDY) from error
    if not isinstance(header, dict):
        raise ModelError(f"The header of {file.name} is not a JSON object.", _REMEDY)
    return header, size - 8 - length


def _count(file: Path, key: str, entry: Any, num_bytes: int) -> int:
    """How many numbers a weight has, whose place in the file is checked."""
    try:
        bits, shape, (start, stop) = _BYTES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        whole = all(isinstance(number, int) and number >= 0 for number in (*shape, start, stop))
        count = math.prod(shape) if whole else -1
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{file.name}: the header's entry of {key!r} cannot be read.", _REMEDY) from error
    if count < 0 or not start <= stop <= num_bytes or (stop - start) * 8 != count * bits:
        said = dict(entry) if isinstance(entry, Mapping) else entry
        raise ModelError(f"{file.name}: the weight {key!r} does not lie where the header says ({said}).", _REMEDY)
    return count
