"""Finds the parts of layers that keep something of each position or sequence, by what they keep: attention and its kin.

Shapes: H hidden size, M heads.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from beheld.core.config import KVGroup, StateShape
from beheld.models.shard_forms import changed, columns, linear_in, only, rows
from beheld.parallel.shard_plan import Shard
from beheld.parallel.shards import Cut, Heads, Piece, blocks, heads_of, sections, share

_OUT = ("o_proj", "out_proj", "dense", "wo")
_QKV = (("q_proj", "k_proj", "v_proj"), ("wq", "wk", "wv"))
_JOINED_QKV = ("qkv_proj", "query_key_value")
# Of these, the one whose outputs are those of each head of keys: its heads of queries, the keys, the values.
_BY_KEYS = "query_key_value"
# A parameter with one number for each head of queries.
_SINKS = "sinks"


def attention(path: str, module: Any, index: int, group: KVGroup, rank: int, ranks: int) -> Shard | None:
    """Return an attention module's part; None if the module has another form."""
    out_name = next((name for name in _OUT if linear_in(module, name) is not None), None)
    if out_name is None or getattr(module, "layer_idx", None) is None:
        return None
    out = getattr(module, out_name)
    num_heads, rest = divmod(out.in_features, group.value_dim)
    if rest or num_heads % group.num_kv_heads:
        return None
    heads = heads_of(num_heads, group.num_kv_heads, rank, ranks)
    wide = (group.head_dim, group.head_dim, group.value_dim)
    cuts: dict[str, Cut] = {}
    joined = next((name for name in _JOINED_QKV if linear_in(module, name) is not None), None)
    if joined is not None:
        linear, start = getattr(module, joined), 0
        pieces: list[Piece] = []
        if joined == _BY_KEYS and len(set(wide)) > 1:
            return None
        for own, count, width in zip(
            (heads.queries, heads.keys, heads.keys), (num_heads, *(group.num_kv_heads,) * 2), wide, strict=True
        ):
            pieces += blocks(own, width, start)
            start += count * width
        if start != linear.out_features:
            return None
        if joined == _BY_KEYS:
            pieces = _by_keys(heads, num_heads // group.num_kv_heads, group.head_dim)
        cuts |= columns(f"{path}.{joined}", linear, Cut(0, tuple(pieces)))
        names = {joined}
    else:
        triple = next((names for names in _QKV if linear_in(module, names[0]) is not None), None)
        if triple is None:
            return None
        names = set()
        for place, name in enumerate(triple):
            linear = linear_in(module, name)
            # Layers that read another layer's keys and values have none of their own.
            if linear is None:
                continue
            own, count = (heads.queries, num_heads) if place == 0 else (heads.keys, group.num_kv_heads)
            width, rest = divmod(linear.out_features, count)
            # Queries may come with as wide a gate for each head.
            if rest or width not in (wide[place], *((2 * wide[0],) if place == 0 else ())):
                return None
            cuts |= columns(f"{path}.{name}", linear, Cut(0, blocks(own, width)))
            names.add(name)
    cuts |= rows(f"{path}.{out_name}", out, Cut(1, blocks(heads.queries, group.value_dim)), rank)
    sinks = getattr(module, _SINKS, None)
    if isinstance(sinks, nn.Parameter) and sinks.numel() == num_heads:
        cuts[f"{path}.{_SINKS}"] = Cut(0, blocks(heads.queries, 1))
        names.add(_SINKS)
    if not only(module, names | {out_name}, group.head_dim):
        return None
    own_q, own_kv = len(heads.queries), len(heads.keys)
    sizes = {
        "num_heads": (num_heads, own_q),
        "num_attention_heads": (num_heads, own_q),
        "num_key_value_heads": (group.num_kv_heads, own_kv),
        "num_kv_heads": (group.num_kv_heads, own_kv),
        "num_key_value_groups": (num_heads // group.num_kv_heads, own_q // own_kv),
    }
    local = dataclasses.replace(group, num_kv_heads=own_kv)
    return Shard(path, cuts, f"{path}.{out_name}", heads, changed(module, sizes), cache=(index, local))


def _by_keys(heads: Heads, per_key: int, width: int) -> list[Piece]:
    """Return the pieces of a layer that has one head of keys after another, with its heads of queries before it."""
    own = len(heads.queries) // len(heads.keys)
    pieces: list[Piece] = []
    for place, key in enumerate(heads.keys):
        start = 0 if key is None else key * (per_key + 2) * width
        for query in heads.queries[place * own : (place + 1) * own]:
            pieces += blocks([None if query is None or key is None else query - key * per_key], width, start)
        pieces += blocks([None, None] if key is None else [per_key, per_key + 1], width, start)
    return pieces


def latent(path: str, module: Any, index: int, group: KVGroup, rank: int, ranks: int) -> Shard | None:
    """Return a latent attention module's part: some heads; latents are every rank's."""
    if not all(hasattr(module, name) for name in ("kv_a_proj_with_mqa", "expand_kv", "num_heads")):
        return None
    queries = "q_b_proj" if linear_in(module, "q_b_proj") is not None else "q_proj"
    q, up, out = (linear_in(module, name) for name in (queries, "kv_b_proj", "o_proj"))
    if q is None or up is None or out is None:
        return None
    count = module.num_heads
    wide = module.qk_nope_head_dim + module.v_head_dim
    sized = (q.out_features, up.out_features, out.in_features)
    if sized != (count * module.qk_head_dim, count * wide, count * module.v_head_dim):
        return None
    heads = heads_of(count, count, rank, ranks)
    own = heads.queries
    cuts = (
        columns(f"{path}.{queries}", q, Cut(0, blocks(own, module.qk_head_dim)))
        | columns(f"{path}.kv_b_proj", up, Cut(0, blocks(own, wide)))
        | rows(f"{path}.o_proj", out, Cut(1, blocks(own, module.v_head_dim)), rank)
    )
    names = ("num_heads", "num_attention_heads", "num_key_value_heads")
    sizes = changed(module, dict.fromkeys(names, (count, len(own))))
    return Shard(path, cuts, f"{path}.o_proj", heads, sizes, cache=(index, group))


def convolution(path: str, module: Any, index: int, group: KVGroup, rank: int, ranks: int) -> Shard | None:
    """Return a gated short convolution's part: some channels."""
    name, conv = next(((n, c) for n, c in module.named_children() if type(c) is nn.Conv1d), ("", None))
    into, out = linear_in(module, "in_proj"), linear_in(module, "out_proj")
    channels = group.num_kv_heads * group.head_dim
    if conv is None or into is None or out is None or conv.groups != channels:
        return None
    sized = conv.out_channels == out.in_features == channels and into.out_features == 3 * channels
    if not sized or not only(module, {name, "in_proj", "out_proj"}):
        return None
    pieces = share(channels, rank, ranks)
    into_cuts = columns(f"{path}.in_proj", into, Cut(0, sections(3, channels, rank, ranks)))
    cuts = into_cuts | _depthwise(f"{path}.{name}", conv, pieces) | rows(f"{path}.out_proj", out, Cut(1, pieces), rank)
    local = dataclasses.replace(group, num_kv_heads=1, head_dim=Cut(0, pieces).size)
    return Shard(path, cuts, f"{path}.out_proj", num_sections=dict.fromkeys(into_cuts, 3), cache=(index, local))


def _depthwise(path: str, conv: nn.Conv1d, pieces: tuple[Piece, ...]) -> dict[str, Cut]:
    names = ("weight",) if conv.bias is None else ("weight", "bias")
    return {f"{path}.{name}": Cut(0, pieces) for name in names}


def delta_rule(path: str, module: Any, index: int, group: KVGroup, rank: int, ranks: int) -> Shard | None:
    """Return a part of a mixer with the gated delta rule: some heads of keys, with their heads of values."""
    names = ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim", "A_log", "dt_bias")
    conv, out = getattr(module, "conv1d", None), linear_in(module, "out_proj")
    if not all(hasattr(module, name) for name in names) or type(conv) is not nn.Conv1d or out is None:
        return None
    keys, values, k_dim, v_dim = (getattr(module, name) for name in names[:4])
    state = group.state
    assert state is not None, "a recurrent group says what it keeps"
    if state.recurrent != (values, k_dim, v_dim) or conv.out_channels != state.conv_channels:
        return None
    heads = heads_of(values, keys, rank, ranks)
    # Of queries, keys and values side by side.
    mixed = (
        *blocks(heads.keys, k_dim),
        *blocks(heads.keys, k_dim, keys * k_dim),
        *blocks(heads.queries, v_dim, 2 * keys * k_dim),
    )
    each = Cut(0, blocks(heads.queries, 1))
    if linear_in(module, "in_proj_qkvz") is not None:
        own = len(heads.queries) // len(heads.keys)
        parts = [heads.queries[place : place + own] for place in range(0, len(heads.queries), own)]
        inputs = {
            "in_proj_qkvz": _of_keys(heads.keys, parts, values // keys, (k_dim, k_dim), (v_dim, v_dim)),
            "in_proj_ba": _of_keys(heads.keys, parts, values // keys, (), (1, 1)),
        }
    else:
        of_values = Cut(0, blocks(heads.queries, v_dim))
        inputs = {"in_proj_qkv": Cut(0, mixed), "in_proj_z": of_values, "in_proj_b": each, "in_proj_a": each}
    cuts = _depthwise(f"{path}.conv1d", conv, mixed) | {f"{path}.{name}": each for name in ("A_log", "dt_bias")}
    for name, cut in inputs.items():
        linear = linear_in(module, name)
        if linear is None:
            return None
        cuts |= columns(f"{path}.{name}", linear, cut)
    cuts |= rows(f"{path}.out_proj", out, Cut(1, blocks(heads.queries, v_dim)), rank)
    if not only(module, {*inputs, "conv1d", "A_log", "dt_bias", "out_proj"}, v_dim):
        return None
    own_k, own_v = len(heads.keys), len(heads.queries)
    channels = 2 * own_k * k_dim + own_v * v_dim
    sizes = {
        "num_k_heads": own_k,
        "num_v_heads": own_v,
        "key_dim": own_k * k_dim,
        "value_dim": own_v * v_dim,
        "conv_dim": channels,
    }
    local = dataclasses.replace(group, state=StateShape((own_v, k_dim, v_dim), channels, state.conv_length))
    return Shard(path, cuts, f"{path}.out_proj", sizes=sizes, cache=(index, local))


def _of_keys(
    keys: tuple[int | None, ...],
    values: list[tuple[int | None, ...]],
    per_key: int,
    before: tuple[int, ...],
    each: tuple[int, ...],
) -> Cut:
    """Return the part of a layer whose outputs are grouped by heads of keys.

    Args:
        keys, values: this rank's heads of keys, and the heads of values of each.
        per_key: how many heads of values each head of keys has in the whole.
        before: sizes of what a head of keys has itself, which comes first.
        each: sizes of what each of its heads of values has; one after another, of all its heads.
    """
    width = sum(before) + per_key * sum(each)
    pieces: list[Piece] = []
    for key, own in zip(keys, values, strict=True):
        pieces += blocks([key], sum(before), 0) if key is None else [range(key * width, key * width + sum(before))]
        start = (0 if key is None else key * width) + sum(before)
        for size in each:
            inner = [None if value is None or key is None else value - key * per_key for value in own]
            pieces += blocks(inner, size, start)
            start += per_key * size
    return Cut(0, tuple(piece for piece in pieces if not isinstance(piece, range) or len(piece)))


def mixer(path: str, module: Any, index: int, group: KVGroup, rank: int, ranks: int) -> Shard | None:
    """Return a module's part, if it is the one that keeps what the group holds; None if it has another form.

    Args:
        index: the group's, in ModelInfo.
    """
    if group.state is not None:
        return delta_rule(path, module, index, group, rank, ranks)
    if group.values_in_keys:
        return latent(path, module, index, group, rank, ranks)
    find = attention if group.value_dim else convolution
    return find(path, module, index, group, rank, ranks)
