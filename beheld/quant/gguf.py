"""GGUF files, dequantized while loading, a few rows at a time, by the package gguf.

Shapes: N outputs, K inputs, B bytes of a row, H heads.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from beheld.checkpoint.convert import family_of_config
from beheld.checkpoint.files import CONFIG, read_json
from beheld.checkpoint.gguf.config import METHOD
from beheld.checkpoint.gguf.header import StoredTensor, read_header
from beheld.checkpoint.gguf.names import renamed
from beheld.checkpoint.weights import weight_files
from beheld.families import registry
from beheld.quant.dequantize import without_quantization
from beheld.quant.method import Replace, TextOf
from beheld.utils.log import get_logger

logger = get_logger(__name__)

# Numbers that are dequantized at a time: they take several times their memory on the way.
_CHUNK = 1 << 21


def make(stated: Mapping[str, Any], device: str, dtype: torch.dtype) -> DequantizedGGUF:
    """Return the method for a checkpoint's quantization_config, `stated`; see quant/method.py."""
    return DequantizedGGUF(dtype)


class DequantizedGGUF:
    """See QuantMethod; nothing is kept as stored."""

    name = METHOD
    converted = "the weights of its GGUF file dequantized"

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def config(self, hf_config: Any) -> Any:
        """Return a copy without what it says of the weights, so that transformers loads plain ones."""
        plain = without_quantization(hf_config)
        # transformers' loader knows safetensors only by this name.
        plain.transformers_weights = None
        return plain

    def weights(self, path: Path) -> dict[str, Any] | None:
        """Return the weights, dequantized when they are read."""
        return open_weights(path, self._dtype)

    def loading(self, model_class: Any, weights: dict[str, Any]) -> Any:
        """Return the class unchanged."""
        kinds = sorted({tensor.kind for tensor in weights.values()})
        logger.info(
            "The weights of the GGUF file (%s) are dequantized to %s as they are loaded, and take its memory.",
            ", ".join(kinds),
            str(self._dtype).removeprefix("torch."),
        )
        return model_class

    def settle(self, model: Any, model_class: Any, text_of: TextOf, replace: Replace) -> None:
        """Do nothing."""

    def stored_bytes(self, path: Path, model: Any, text_of: TextOf) -> int | None:
        """Return None: weights take what their numbers take."""
        return None


class GGUFTensor:
    """A tensor of the file, dequantized when it is read, for transformers' loader in place of a slice.

    Args:
        data: the file, mapped into memory.
        stored: the tensor's place and type.
        heads: the number of heads whose rows the file has in llama.cpp's order; None for rows in transformers' order.
        dtype: of the numbers that are given.
    """

    def __init__(self, data: mmap.mmap, stored: StoredTensor, heads: int | None, dtype: torch.dtype) -> None:
        self._data, self._stored, self._heads, self._dtype = data, stored, heads, dtype
        self.kind = stored.kind

    def get_shape(self) -> list[int]:
        """Return the shape, as a slice of a safetensors file does."""
        return list(self._stored.shape)

    def __getitem__(self, index: Any) -> Tensor:
        """Return the part `index`."""
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        shape, kind = self._stored.shape, GGMLQuantizationType[self.kind]
        inputs = shape[-1] if len(shape) > 1 else 1
        outputs = int(np.prod(shape)) // inputs
        raw_NB = np.frombuffer(self._data, np.uint8, self._stored.num_bytes, self._stored.start)
        raw_NB = raw_NB.reshape(outputs, -1)
        found_NK = torch.empty(outputs, inputs, dtype=self._dtype)
        rows = max(1, _CHUNK // inputs)
        order_N = None if self._heads is None else source_rows(outputs, self._heads)
        for start in range(0, outputs, rows):
            part = raw_NB[start : start + rows] if order_N is None else raw_NB[order_N[start : start + rows]]
            found_NK[start : start + rows] = torch.from_numpy(np.array(dequantize(part, kind)))
        return found_NK.view(shape)[index]


def source_rows(outputs: int, heads: int) -> np.ndarray:
    """Return the file's row for each row in transformers' order, of queries or keys in llama.cpp's.

    It has the two numbers of a head that are rotated together in rows next to each other; transformers has them half a
    head apart.
    """
    order_H2 = np.arange(outputs).reshape(heads, -1, 2)
    return order_H2.swapaxes(1, 2).reshape(-1)


def open_weights(path: Path, dtype: torch.dtype) -> dict[str, Any]:
    """Return the weights of the file that `path` names, by transformers' names, unread.

    Raises:
        ModelError: the file is broken.
    """
    said = read_json(path / CONFIG)
    file = path / weight_files(path)[0]
    header = read_header(file)
    with file.open("rb") as opened:
        data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    found: dict[str, Any] = {}
    for name, stored in header.tensors.items():
        known = renamed(name)
        if known is not None:
            found[known] = GGUFTensor(data, stored, _heads(name, said), dtype)
    return found


def _heads(name: str, said: Mapping[str, Any]) -> int | None:
    """Return the number of heads whose rows are in llama.cpp's order."""
    layout = registry.facts(family_of_config(said)).gguf
    part = name.split(".")[-2]
    return int(said[layout.permuted[part]]) if layout is not None and part in layout.permuted else None
