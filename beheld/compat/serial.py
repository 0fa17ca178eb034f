"""Vectors as bytes, under the names of vLLM's module for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from beheld.api.vector_bytes import ORDERS, TYPES, from_bytes, to_bytes

EMBED_DTYPE_TO_TORCH_DTYPE = {name: getattr(torch, kind) for name, kind in TYPES.items()}
ENDIANNESS = list(ORDERS)


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
