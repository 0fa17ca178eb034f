"""Tensors as type, shape and bytes, and back."""

from __future__ import annotations

import torch

from beheld.core.errors import ConfigError
from beheld.platform.registry import in_host_memory
from beheld.sandbox.codec import count_of

_DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float32, torch.float16, torch.bfloat16, torch.float64),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}


def parts(tensor: torch.Tensor) -> tuple[str, list[int], memoryview]:
    """Type, shape and bytes of a tensor in the host's memory; the bytes are the tensor's own where it is contiguous.

    Raises:
        ConfigError: it lies elsewhere, or is of a type that has no agreed bytes.
    """
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in _DTYPES or not in_host_memory(tensor):
        raise ConfigError(f"A tensor of {dtype} on {tensor.device} cannot be handed to another process.")
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return dtype, list(tensor.shape), memoryview(flat.numpy())  # type: ignore[arg-type]


def of(dtype: str, shape: list[int], buffer: memoryview) -> torch.Tensor:
    """The tensor that lies in `buffer`.

    Raises:
        ValueError: the shape does not fit.
    """
    kind = _DTYPES[dtype]
    count = count_of(shape)
    if count * kind.itemsize != len(buffer):
        raise ValueError("a tensor's shape does not fit its buffer")
    if count == 0:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(buffer, dtype=kind).reshape(shape)
