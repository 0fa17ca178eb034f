"""Checks of a module's parts, and cuts of its linear layers, for the code that finds what ranks share out.

A module that has further parts with weights is of another form, and is not cut.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from beheld.parallel.shards import Cut, Zeros


def linear_in(module: Any, name: str) -> nn.Linear | None:
    """Return a module's linear layer of this name; None if it has none that is plain."""
    found = getattr(module, name, None)
    return found if type(found) is nn.Linear else None


def only(module: nn.Module, names: set[str], norm_size: int | None = None) -> bool:
    """Return whether no other part of a module has weights, except norms of `norm_size` numbers."""
    own = {name for name, _ in module.named_parameters(recurse=False)}
    if own - names:
        return False
    for name, child in module.named_children():
        sizes = [parameter.numel() for parameter in child.parameters()]
        if name not in names and any(size != norm_size for size in sizes):
            return False
    return True


def only_batched(module: Any) -> bool:
    """Return whether a module of experts computes as many rows of each in one product, its gate's half first."""
    kind: Any = type(module)
    source = _source_of(kind)
    return "torch.bmm" in source and "chunk(2" in source


@functools.cache
def _source_of(kind: Any) -> str:
    try:
        return inspect.getsource(kind.forward)
    except (OSError, TypeError):
        return ""


def columns(path: str, linear: nn.Linear, cut: Cut) -> dict[str, Cut]:
    """Return the cuts of a layer of which each rank computes some outputs."""
    found = {f"{path}.weight": cut}
    return found if linear.bias is None else found | {f"{path}.bias": cut}


def rows(path: str, linear: nn.Linear, cut: Cut, rank: int) -> dict[str, Cut]:
    """Return the cuts of a layer of which each rank multiplies some inputs; one rank adds the bias."""
    found = {f"{path}.weight": dataclasses.replace(cut, dim=1)}
    if linear.bias is not None:
        size = linear.out_features
        found[f"{path}.bias"] = Cut(0, (range(size),) if rank == 0 else (Zeros(size),))
    return found


def changed(module: Any, sizes: Mapping[str, tuple[int, int]]) -> dict[str, int]:
    """Return the attributes of a module that hold a size of the whole, with the part's size."""
    return {name: own for name, (size, own) in sizes.items() if getattr(module, name, None) == size}
