"""Operators of ours that PyTorch knows by name, so that torch.compile sees one call and not what is behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_library = torch.library.Library("beheld", "FRAGMENT")


def register(schema: str, function: Callable[..., Any], shape: Callable[..., Any]) -> None:
    """Register an operator of the namespace `beheld`, for all devices.

    Its shape is registered for tensors without memory (the key Meta): `torch.library.register_fake` would look for its
    source through all imported modules, 10 to 20 ms for the first operator of a start and 1 to 4 for each other.

    Args:
        schema: name, arguments and results in PyTorch's words.
        function: computes it.
        shape: takes the same arguments, without memory, and returns results of the same shapes and types.
    """
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, function, "CompositeExplicitAutograd")
    _library.impl(name, shape, "Meta")
