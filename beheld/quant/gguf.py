"""GGUF files: weights of few bits are kept, others are dequantized while loading by the package gguf.

Shapes: N outputs, K inputs, B bytes of a row, H heads.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import mmap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from beheld.checkpoint.convert import family_of_config
from beheld.checkpoint.files import CONFIG, read_json
from beheld.checkpoint.gguf import projector
from beheld.checkpoint.gguf.config import METHOD, families_by_architecture
from beheld.checkpoint.gguf.header import StoredTensor, read_header
from beheld.checkpoint.gguf.names import renamed
from beheld.checkpoint.weights import weight_files
from beheld.core.errors import ModelError
from beheld.families import registry
from beheld.families.family import GGUFLayout
from beheld.parallel.shards import Cut
from beheld.platform.registry import platform_of
from beheld.quant import gguf_blocks
from beheld.quant.at_load import is_tied, parent_of, tied_again
from beheld.quant.dequantize import AS_STORED, are_kept, without_quantization
from beheld.quant.grouped import GroupedForm, GroupedNumbers
from beheld.quant.grouped_linear import GroupedLinear
from beheld.quant.kept_groups import KeptGroups
from beheld.quant.method import Replace, StorageTarget, TextOf
from beheld.utils.log import get_logger

logger = get_logger(__name__)

# Numbers that are dequantized at a time: they take several times their memory on the way.
_CHUNK = 1 << 21
# Types without scales.
_PLAIN = ("F32", "F16", "BF16")
_EMBEDDINGS = "embed_tokens.weight"
# The prefix of our names of the text model's weights; the head's name has none.
_TEXT = "model."


def make(stated: Mapping[str, Any], target: StorageTarget) -> GGUF:
    """Return the method for a checkpoint's quantization_config, `stated`; see quant/method.py."""
    return GGUF(target)


class GGUF:
    """See QuantMethod."""

    name = METHOD
    converted = "the weights of its GGUF file dequantized"

    def __init__(self, target: StorageTarget) -> None:
        self._dtype = target.dtype
        self._groups = KeptGroups(target)
        # A file mixes forms, of which a GPU multiplies some; the others would keep layers from being joined.
        self._keeps = self._groups.objection is None and platform_of(target.device).shares_host_memory
        self._embeddings: str | None = None
        self._weights: Mapping[str, Any] = {}

    def config(self, hf_config: Any) -> Any:
        """Return a copy without its entries about quantization, so that transformers loads plain weights."""
        plain = without_quantization(hf_config)
        # transformers' loader knows safetensors only by this name.
        plain.transformers_weights = None
        return plain

    def weights(self, path: Path) -> dict[str, Any] | None:
        """Return the weights, dequantized when they are read."""
        return open_weights(path, self._dtype)

    def loading(self, model_class: Any, weights: dict[str, Any]) -> Any:
        """Return the class, with room for weights that are kept."""
        kinds = sorted({tensor.kind for tensor in weights.values()})
        if self._keeps and set(kinds) & set(gguf_blocks.KINDS):
            self._embeddings = next((name for name in weights if name.endswith(_EMBEDDINGS)), None)
            self._weights = weights
            return self._groups.loading(model_class, weights)
        kept = bool(set(kinds) & set(gguf_blocks.KINDS))
        logger.log(
            logging.WARNING if kept else logging.INFO,
            "The weights of the GGUF file (%s) are dequantized to %s as they are loaded, and take its memory%s.",
            ", ".join(kinds),
            str(self._dtype).removeprefix("torch."),
            f", because {self._groups.objection}" if kept else "",
        )
        return model_class

    def kept_as(self, parameter: Tensor, weights: Sequence[Any]) -> str | None:
        """Return that they are as stored, if they are kept."""
        return AS_STORED if self._keeps and are_kept(self._groups.takes, parameter, weights) else None

    def settle(self, model: Any, model_class: Any, text_of: TextOf, replace: Replace) -> None:
        """Insert layers that multiply kept weights, if there are any; a tied head gets the file's numbers too."""
        if not hasattr(model, "kept_rows"):
            return
        self._groups.settle(model, model_class, replace)
        # Ranks have put their part there.
        source, head = self._weights.get(self._embeddings or ""), model.get_output_embeddings()
        if not isinstance(source, KeptTensor) or not is_tied(model, head):
            return
        numbers = GroupedNumbers.of_fields(source.fields(), source.form, None)
        parent, name = parent_of(model, head)
        replace(parent, name, GroupedLinear(numbers, None, self._dtype), lambda made: tied_again(model, made))

    def stored_bytes(
        self, path: Path, model: Any, text_of: TextOf, weights: Mapping[str, Any] | None = None
    ) -> int | None:
        """Return the bytes with kept weights; None: weights take what their numbers take."""
        if not self._keeps:
            return None
        weights = open_weights(path, self._dtype) if weights is None else dict(weights)
        head = model.get_output_embeddings()
        embeddings = next((weights.pop(name) for name in list(weights) if name.endswith(_EMBEDDINGS)), None)
        total = self._groups.stored_bytes(weights, model)
        if is_tied(model, head) and isinstance(embeddings, KeptTensor):
            total += embeddings.form.kept_bytes(embeddings.outputs)
        return total


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
        # A rank's rows, in transformers' order, and the bytes of each; None for all.
        self._rows: np.ndarray | None = None
        self._bytes: np.ndarray | None = None
        self._shape = tuple(stored.shape)

    def get_shape(self) -> list[int]:
        """Return the shape, as a slice of a safetensors file does."""
        return list(self._shape)

    def rank_part(self, cut: Cut) -> Self | None:
        """Return a rank's part of a matrix, of which no more is read; None for zeros, or parts of blocks."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        if len(self._shape) != 2 or not all(isinstance(piece, range) for piece in cut.pieces) or not cut.pieces:
            return None
        indices = np.concatenate(
            [np.arange(piece.start, piece.stop) for piece in cut.pieces if isinstance(piece, range)]
        )
        made = copy.copy(self)
        if cut.dim == 0:
            made._rows = indices if self._rows is None else self._rows[indices]
            made._shape = len(indices), self._shape[1]
            return made
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType[self.kind]]
        if any(p.start % block or p.stop % block for p in cut.pieces if isinstance(p, range)):
            return None
        blocks = indices[::block] // block
        own = (blocks[:, None] * size + np.arange(size)).reshape(-1)
        made._bytes = own if self._bytes is None else self._bytes[own]
        made._shape = self._shape[0], len(indices)
        return made

    def _raw(self, outputs: int) -> np.ndarray:
        """Return the whole tensor's bytes, (outputs, bytes of one)."""
        raw = np.frombuffer(self._data, np.uint8, self._stored.num_bytes, self._stored.start)
        return raw.reshape(outputs, -1)

    def _parts(self) -> Iterator[np.ndarray]:
        """Yield the bytes of some outputs after the others, (outputs, bytes of one), in transformers' order."""
        inputs = self._stored.shape[-1] if len(self._stored.shape) > 1 else 1
        outputs = int(np.prod(self._stored.shape)) // inputs
        raw_NB = self._raw(outputs)
        order_N = None if self._heads is None else source_rows(outputs, self._heads)
        if self._rows is not None:
            order_N = self._rows if order_N is None else order_N[self._rows]
        rows = max(1, _CHUNK // inputs)
        for start in range(0, outputs if order_N is None else len(order_N), rows):
            part = raw_NB[start : start + rows] if order_N is None else raw_NB[order_N[start : start + rows]]
            yield part if self._bytes is None else np.ascontiguousarray(part[:, self._bytes])

    def is_zero(self) -> bool:
        """Return whether all numbers are zero; rows are read up to the first that is not."""
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        shape, kind = self._stored.shape, GGMLQuantizationType[self.kind]
        raw_NB = self._raw(int(np.prod(shape[:-1])))
        rows = max(1, _CHUNK // shape[-1])
        # The first row nearly always tells.
        starts = (0, *range(1, len(raw_NB), rows))
        stops = (1, *(start + rows for start in starts[1:]))
        return not any(dequantize(raw_NB[a:b], kind).any() for a, b in zip(starts, stops, strict=True))

    def __getitem__(self, index: Any) -> Tensor:
        """Return the part `index`."""
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        shape, kind = self._shape, GGMLQuantizationType[self.kind]
        inputs = shape[-1] if len(shape) > 1 else 1
        found_NK = torch.empty(int(np.prod(shape)) // inputs, inputs, dtype=self._dtype)
        start = 0
        for part in self._parts():
            found_NK[start : start + len(part)] = torch.from_numpy(np.array(dequantize(part, kind)))
            start += len(part)
        return found_NK.view(shape)[index]


class LessOne(GGUFTensor):
    """A norm's weight to which llama.cpp's converter has added 1."""

    def __getitem__(self, index: Any) -> Tensor:
        """Return the part `index`."""
        # Exact: the file has it in float32.
        whole = GGUFTensor(self._data, self._stored, None, torch.float32)[...] - 1
        return whole[index].to(self._dtype)


class StackedTensor:
    """A tensor whose slices along a dimension are tensors of the file; see GGUFTensor."""

    def __init__(self, parts: Sequence[GGUFTensor], dim: int) -> None:
        self._parts, self._dim = parts, dim
        self.kind = parts[0].kind

    def get_shape(self) -> list[int]:
        """Return the shape, as a slice of a safetensors file does."""
        shape = self._parts[0].get_shape()
        return [*shape[: self._dim], len(self._parts), *shape[self._dim :]]

    def __getitem__(self, index: Any) -> Tensor:
        """Return the part `index`."""
        return torch.stack([part[...] for part in self._parts], self._dim)[index]


class JoinedTensor:
    """A tensor whose parts along the first dimension are tensors of the file; see GGUFTensor."""

    def __init__(self, parts: Sequence[GGUFTensor]) -> None:
        self._parts = parts
        self.kind = parts[0].kind

    def get_shape(self) -> list[int]:
        """Return the shape, as a slice of a safetensors file does."""
        shapes = [part.get_shape() for part in self._parts]
        return [sum(shape[0] for shape in shapes), *shapes[0][1:]]

    def __getitem__(self, index: Any) -> Tensor:
        """Return the part `index`."""
        return torch.cat([part[...] for part in self._parts])[index]


class KeptTensor(GGUFTensor):
    """A matrix of the file whose blocks are grouped numbers.

    Args:
        form: of the numbers.
    """

    order_K: Tensor | None = None

    def __init__(
        self, data: mmap.mmap, stored: StoredTensor, heads: int | None, dtype: torch.dtype, form: GroupedForm
    ) -> None:
        super().__init__(data, stored, heads, dtype)
        self.outputs, self.form = stored.shape[0], form

    def fields(self) -> Sequence[Tensor]:
        """Return the fields of each output; see row_bytes.StoredWeight."""
        # The file's pages cannot be written to, which tensors may be.
        parts = [gguf_blocks.numbers_of(self.kind, torch.from_numpy(np.array(own))).fields() for own in self._parts()]
        return [torch.cat(each) for each in zip(*parts, strict=True)]

    def rank_part(self, cut: Cut) -> Self | None:
        """Return the part that a rank holds; see GGUFTensor."""
        made = super().rank_part(cut)
        form = None if made is None else gguf_blocks.form_of(self.kind, made._shape[1])
        if made is not None and form is not None:
            made.outputs, made.form = made._shape[0], form
        return made


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
        ModelError: the file is broken, or a quantized tensor of it is zero.
    """
    said = read_json(path / CONFIG)
    file = path / weight_files(path)[0]
    header = read_header(file)
    with file.open("rb") as opened:
        data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    vision = said["quantization_config"].get("mmproj")
    found = {} if vision is None else _vision_weights(Path(vision), dtype)
    family = registry.facts(family_of_config(said))
    prefix = _TEXT if vision is None or family.gguf_projector is None else family.gguf_projector.text_prefix
    said = said.get("text_config") or said
    # The one that its config.json was made by.
    layout = families_by_architecture()[header.metadata["general.architecture"]].gguf
    assert layout is not None, "only families with a layout are there"
    for name, stored in header.tensors.items():
        known = renamed(name, layout.parts)
        if known is None:
            continue
        if stored.kind not in _PLAIN and GGUFTensor(data, stored, None, dtype).is_zero():
            raise ModelError(
                f"{file.name}: the tensor {name!r} holds nothing but zeros; its scales leave nothing of it.",
                "Fetch the file again, or ask its publisher.",
            )
        known = prefix + known.removeprefix(_TEXT) if known.startswith(_TEXT) else known
        heads = heads_of(name, layout, said)
        if "{}" in known:
            for number, own in enumerate(_slices(stored)):
                found[known.format(number)] = _tensor(data, own, heads, dtype)
        elif layout.norms_plus_one and known.endswith("norm.weight"):
            found[known] = LessOne(data, stored, heads, dtype)
        else:
            found[known] = _tensor(data, stored, heads, dtype)
    return found


def _tensor(data: mmap.mmap, stored: StoredTensor, heads: int | None, dtype: torch.dtype) -> GGUFTensor:
    form = gguf_blocks.form_of(stored.kind, stored.shape[-1]) if len(stored.shape) == 2 else None
    rest = (data, stored, heads, dtype)
    return GGUFTensor(*rest) if form is None else KeptTensor(*rest, form)


def _slices(stored: StoredTensor) -> list[StoredTensor]:
    """Return the parts of a tensor along its first dimension: the experts' matrices."""
    count = stored.shape[0]
    size = stored.num_bytes // count
    return [
        dataclasses.replace(stored, shape=stored.shape[1:], num_bytes=size, start=stored.start + number * size)
        for number in range(count)
    ]


def _vision_weights(file: Path, dtype: torch.dtype) -> dict[str, Any]:
    """Return the weights of the vision part's file, by transformers' names, unread."""
    header = read_header(file)
    layout = projector.projector_of(header, file)
    with file.open("rb") as opened:
        data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    found: dict[str, Any] = {}
    for theirs, names in projector.weights_of(layout, header).items():
        stem = names[0].rpartition(".")[0]
        kind = LessOne if stem in layout.plus_one else GGUFTensor
        parts = [kind(data, header.tensors[name], None, dtype) for name in names]
        if len(parts) == 1:
            found[theirs] = parts[0]
        elif stem in layout.stacked:
            found[theirs] = StackedTensor(parts, layout.stacked[stem])
        else:
            found[theirs] = JoinedTensor(parts)
    for theirs, other in layout.stand_ins.items():
        for name in [name for name in found if name.rpartition(".")[0] == other]:
            found.setdefault(name.replace(other, theirs), found[name])
    return found


def heads_of(name: str, layout: GGUFLayout, said: Mapping[str, Any]) -> int | None:
    """Return the number of heads whose rows are in llama.cpp's order, by the file's name; None for no such order.

    Args:
        said: the text model's config.json.
    """
    part = name.split(".")[-2]
    return int(said[layout.permuted[part]]) if part in layout.permuted else None
