"""Vectors as bytes, under the names of vLLM's module for them."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from beheld.api.vector_bytes import ORDERS, TYPES, from_bytes, to_bytes

EMBED_DTYPE_TO_TORCH_DTYPE = {name: getattr(torch, kind) for name, kind in TYPES.items()}
ENDIANNESS = list(ORDERS)


@dataclass(frozen=True)
class DTypeInfo:
    """A number type, as torch has it."""

    torch_dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of a number."""
        return self.torch_dtype.itemsize


EMBED_DTYPES = {name: DTypeInfo(kind) for name, kind in EMBED_DTYPE_TO_TORCH_DTYPE.items()}


def tensor2base64(x: torch.Tensor) -> str:
    """Base64 of `torch.save(x)`, as requests send embeddings."""
    buffer = io.BytesIO()
    torch.save(x, buffer)
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def tensor2binary(tensor: torch.Tensor, embed_dtype: str, endianness: str) -> bytes:
    """The bytes of a tensor."""
    return to_bytes(tensor, embed_dtype, endianness)


def binary2tensor(binary: bytes, shape: tuple[int, ...], embed_dtype: str, endianness: str) -> torch.Tensor:
    """The tensor of bytes; one size of `shape` may be -1."""
    found: torch.Tensor = from_bytes(binary, shape, embed_dtype, endianness)
    return found


@dataclass
class MetadataItem:
    """Where a vector lies in a body, as the header `metadata` of an answer in bytes says it."""

    index: int
    embed_dtype: str
    endianness: str
    start: int
    end: int
    shape: tuple[int, ...]


def decode_pooling_output(items: Sequence[MetadataItem], body: bytes) -> list[torch.Tensor]:
    """The vectors of a body, in the order of the request's inputs."""
    return [
        binary2tensor(body[item.start : item.end], tuple(item.shape), item.embed_dtype, item.endianness)
        for item in sorted(items, key=lambda item: item.index)
    ]


def build_metadata_items(
    embed_dtype: str, endianness: str, shape: tuple[int, ...], n_request: int
) -> list[MetadataItem]:
    """Where vectors of one shape lie in a body without the header, one for each of `n_request` inputs."""
    size = math.prod(shape) * EMBED_DTYPES[embed_dtype].nbytes
    return [MetadataItem(k, embed_dtype, endianness, k * size, (k + 1) * size, shape) for k in range(n_request)]
