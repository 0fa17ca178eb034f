"""Vectors as bytes, under the names of vLLM's module for them."""

from __future__ import annotations

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
