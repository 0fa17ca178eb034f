"""The tensors that hold a model's weights, to compare them with those of another moment, or to make them useless."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

_OF_MODULES = frozenset(vars(nn.Module()))
# Objects of objects hold the tensors of weights in groups.
_DEPTH = 3


def weight_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Each tensor once, with a name: parameters, and what layers that store weights in a form of their own hold.

    Adapters are none of them, nor are buffers, which a configuration alone decides.
    """
    seen: set[int] = set()
    for place, module in model.named_modules():
        held: dict[str, Any] = dict(module._parameters)
        if hasattr(module, "packed_bytes"):
            held |= {name: value for name, value in vars(module).items() if name not in _OF_MODULES}
        for name, value in held.items():
            for path, tensor in _tensors(name.strip("_"), value, _DEPTH):
                if id(tensor) not in seen and tensor.numel():
                    seen.add(id(tensor))
                    yield f"{place}.{path}" if place else path, tensor


def _tensors(name: str, value: Any, depth: int) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif depth and isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from _tensors(f"{name}.{index}", each, depth - 1)
    elif depth and type(value).__module__.startswith("beheld.") and not isinstance(value, nn.Module):
        for inner, each in getattr(value, "__dict__", {}).items():
            yield from _tensors(f"{name}.{inner.strip('_')}", each, depth - 1)


@torch.inference_mode()
def checksums(model: nn.Module) -> dict[str, str]:
    """The SHA-256 of each tensor's bytes, as hexadecimal digits; one tensor at a time is copied to the host."""
    found = {}
    for name, tensor in weight_tensors(model):
        plain = tensor.to_dense() if tensor.is_mkldnn else tensor
        values = plain.detach().cpu().contiguous().reshape(-1)
        found[name] = hashlib.sha256(values.view(torch.uint8).numpy().data).hexdigest()
    return found


@torch.inference_mode()
def reset_(model: nn.Module) -> None:
    """Make all weights zero, in place."""
    for _, tensor in weight_tensors(model):
        if tensor.is_mkldnn:
            # Its own way counts floats without what fills blocks up, and other types by the size of floats.
            place, size = torch.ops.mkldnn.data_ptr(tensor), torch.ops.mkldnn._nbytes(tensor)
            ctypes.memset(int(place), 0, int(size))
        else:
            tensor.data.zero_()
