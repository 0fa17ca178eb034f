"""Finds the parts of towers that ranks share out: heads of attention, in stacks of equal layers.

Attention in a tower reads its sizes in many ways, so only code that is known to count by heads is cut: a module whose
forward splits its projections into heads of `head_dim`, however many there are. All others are whole on every rank.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

from torch import nn

from beheld.models.shard_forms import changed, columns, linear_in, only, rows
from beheld.models.surgery.linears import forward_text
from beheld.parallel.shard_plan import Shard
from beheld.parallel.shards import Cut, blocks, heads_of

_OUT = ("out_proj", "o_proj", "proj", "projection_layer")
_QKV = ("q_proj", "k_proj", "v_proj")
_JOINED_QKV = "qkv"
# How a forward makes heads of what it projects, and how it joins them: both take as many heads as there are.
_SPLITS = re.compile(r"\(\*input_shape, -1, self\.head_dim\)")
_SPLITS_JOINED = re.compile(r"\.reshape\(seq_length, 3, self\.num_heads, -1\)")
_JOINS = re.compile(r"\.reshape\((\*input_shape|seq_length), -1\)")
# Sizes of the whole, which would then be wrong.
_WHOLE = re.compile(r"self\.(embed_dim|hidden_size|all_head_size|dim)\b|config\.(hidden_size|num_)")


def tower_modules(model: nn.Module, text: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules, by their full names, of stacks of equal layers outside the text model; each once."""
    inside = set(text.modules())
    for path, stack in model.named_modules():
        if isinstance(stack, nn.ModuleList) and stack not in inside and len({type(layer) for layer in stack}) == 1:
            for number, layer in enumerate(stack):
                if layer not in inside:
                    # A stack may be a layer of another one.
                    inside.update(layer.modules())
                    yield from layer.named_modules(prefix=f"{path}.{number}")


def tower_attention(path: str, module: Any, rank: int, ranks: int) -> Shard | None:
    """Return the part of a tower's attention module; None if the module has another form."""
    out_name = next((name for name in _OUT if linear_in(module, name) is not None), None)
    size, count = getattr(module, "head_dim", None), getattr(module, "num_heads", None)
    if out_name is None or not isinstance(size, int) or not isinstance(count, int):
        return None
    out, joined = getattr(module, out_name), linear_in(module, _JOINED_QKV)
    kind: Any = type(module)
    if out.in_features != count * size or not _counts_by_heads(kind, joined is not None):
        return None
    own = heads_of(count, count, rank, ranks).queries
    if joined is not None:
        if joined.out_features != 3 * count * size:
            return None
        pieces = tuple(piece for part in range(3) for piece in blocks(own, size, part * count * size))
        cuts, names = columns(f"{path}.{_JOINED_QKV}", joined, Cut(0, pieces)), {_JOINED_QKV}
    else:
        linears = [linear_in(module, name) for name in _QKV]
        cuts, names = {}, set(_QKV)
        for name, linear in zip(_QKV, linears, strict=True):
            if linear is None or linear.out_features != count * size:
                return None
            cuts |= columns(f"{path}.{name}", linear, Cut(0, blocks(own, size)))
    cuts |= rows(f"{path}.{out_name}", out, Cut(1, blocks(own, size)), rank)
    if not only(module, names | {out_name}, size):
        return None
    sizes = changed(module, {"num_heads": (count, len(own)), "num_key_value_heads": (count, len(own))})
    return Shard(path, cuts, f"{path}.{out_name}", sizes=sizes, tower=True)


@functools.cache
def _counts_by_heads(kind: Any, joined: bool) -> bool:
    """Return whether a class's forward takes as many heads as its projections give."""
    source = forward_text(kind)
    splits = (_SPLITS_JOINED if joined else _SPLITS).search(source)
    return splits is not None and _JOINS.search(source) is not None and _WHOLE.search(source) is None
