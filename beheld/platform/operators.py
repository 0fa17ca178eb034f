"""Operators of ours, `torch.ops.beheld.NAME`, which torch.compile takes for opaque calls.

PyTorch notes who registers an operator and describes its result, and looks for that file among all imported modules,
one by one, for each file that it does not know. So all are registered from this one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_library = torch.library.Library("beheld", "FRAGMENT")


def register(schema: str, function: Callable[..., Any], shape: Callable[..., Any]) -> None:
    """Register an operator.

    Args:
        schema: its name, arguments and results, such as "tower(Tensor q, int size) -> Tensor".
        function: computes it, on all devices.
        shape: makes results of the same shapes and types, of which only those count.
    """
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"beheld::{name}", shape, lib=_library)
