"""Vectors as bytes in the number types and byte orders that vLLM's clients name."""

from __future__ import annotations

import sys
from typing import Any

# A client's name of a type -> torch's.
TYPES = {
    "float32": "float32",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}
ORDERS = ("native", "big", "little")


def to_bytes(values: Any, kind: str = "float32", order: str = "little") -> bytes:
    """The bytes of a tensor of any shape, rounded to `kind`, in `order`."""
    import torch

    made = values.to(getattr(torch, TYPES[kind])).contiguous().flatten()
    found = made.view(getattr(torch, f"uint{8 * made.element_size()}")).numpy()
    return bytes((found.byteswap() if _foreign(order) else found).tobytes())


def from_bytes(data: bytes, shape: tuple[int, ...], kind: str, order: str) -> Any:
    """The tensor of `shape` whose `to_bytes` is `data`."""
    import numpy as np
    import torch

    wanted = getattr(torch, TYPES[kind])
    found = np.frombuffer(data, np.dtype(f"u{wanted.itemsize}"))
    # A copy, as what numpy reads from bytes is read-only.
    return torch.from_numpy(found.byteswap() if _foreign(order) else found.copy()).view(wanted).reshape(shape)


def _foreign(order: str) -> bool:
    """True if `order` is not this machine's."""
    return order not in ("native", sys.byteorder)
