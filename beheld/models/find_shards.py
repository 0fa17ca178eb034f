"""Finds which weights of a text model ranks share out: attention heads, inner units, experts, the vocabulary.

Modules are known by their form: the names of their linear layers and the sizes of their weights. A module that has
anything else with weights is computed whole by every rank, which is as right and only takes more memory.

Shapes: H hidden size, I an MLP's inner size, E experts, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import nn

from beheld.core.config import KVGroup, ModelInfo
from beheld.core.errors import ModelError
from beheld.models.surgery.experts import usual_form
from beheld.models.surgery.parts import text_model
from beheld.parallel.shard_plan import Shard, ShardPlan
from beheld.parallel.shards import Cut, Piece, Zeros, blocks, heads_of, sections, share

_OUT = ("o_proj", "out_proj", "dense", "wo")
_QKV = (("q_proj", "k_proj", "v_proj"), ("wq", "wk", "wv"))
_JOINED_QKV = ("qkv_proj", "query_key_value")
# Of an MLP: layers to the inner units, of each of which the layer back takes all, and the layer back.
_MLPS = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("w1", "w3"), "w2"),
    (("up_proj",), "down_proj"),
    (("fc1",), "fc2"),
    (("c_fc",), "c_proj"),
    (("gate_up_proj",), "down_proj"),
)
_JOINED_GATE = "gate_up_proj"
# A parameter with one number for each head of queries.
_SINKS = "sinks"


def find(model: Any, info: ModelInfo, rank: int, ranks: int) -> ShardPlan:
    """Return what this rank holds of a model, whose weights are whole and may be on the meta device.

    Raises:
        ModelError: nothing of it can be shared out.
    """
    text = text_model(model)
    prefix = next(name for name, module in model.named_modules() if module is text)
    found: list[Shard] = []
    attention: list[Shard] = []
    whole: list[str] = []
    for number, layer in enumerate(text.layers):
        path = f"{prefix}.layers.{number}" if prefix else f"layers.{number}"
        group = _group_of(info, number)
        own = [
            shard
            for name, module in layer.named_modules(prefix=path)
            if group is not None and (shard := _attention(name, module, group, rank, ranks)) is not None
        ]
        if len(own) == 1:
            attention += own
        inside = tuple(shard.path + "." for shard in own)
        for name, module in layer.named_modules(prefix=path):
            if not f"{name}.".startswith(inside or ("\0",)):
                shard = _experts(name, module, rank, ranks) or _mlp(name, module, rank, ranks)
                if shard is not None:
                    found.append(shard)
    if len(attention) == len(text.layers):
        found += attention
    else:
        whole.append("attention, which has another form")
    vocabulary = _vocabulary(model, rank, ranks)
    if vocabulary is None:
        whole.append("the vocabulary")
    plan = ShardPlan(rank, ranks, tuple(found), whole=tuple(whole))
    if vocabulary is not None:
        shard, embedding, head, size = vocabulary
        plan = dataclasses.replace(plan, shards=(*plan.shards, shard), embedding=embedding, head=head, vocab_size=size)
    if not found:
        raise ModelError(
            f"{info.architecture} cannot run with tensor_parallel_size={ranks}: no layer of it has a form that can be "
            "shared out.",
            "Give 1.",
        )
    return plan


def _group_of(info: ModelInfo, number: int) -> KVGroup | None:
    """Return the group of a layer's keys and values, its own or those that it reads."""
    for group in info.kv_groups:
        if number in group.layers or any(number == reader for reader, _ in group.readers):
            return group
    return None


def _linear(module: Any, name: str) -> nn.Linear | None:
    found = getattr(module, name, None)
    return found if type(found) is nn.Linear else None


def _only(module: nn.Module, names: set[str], norm_size: int | None = None) -> bool:
    """Return whether no other part of a module has weights, but for norms of so many numbers."""
    own = {name for name, _ in module.named_parameters(recurse=False)}
    if own - names:
        return False
    for name, child in module.named_children():
        sizes = [parameter.numel() for parameter in child.parameters()]
        if name not in names and any(size != norm_size for size in sizes):
            return False
    return True


def _columns(path: str, linear: nn.Linear, cut: Cut) -> dict[str, Cut]:
    """Return the cuts of a layer of which each rank computes some outputs."""
    found = {f"{path}.weight": cut}
    return found if linear.bias is None else found | {f"{path}.bias": cut}


def _rows(path: str, linear: nn.Linear, cut: Cut, rank: int) -> dict[str, Cut]:
    """Return the cuts of a layer of which each rank multiplies some inputs; one rank adds the bias."""
    found = {f"{path}.weight": dataclasses.replace(cut, dim=1)}
    if linear.bias is not None:
        size = linear.out_features
        found[f"{path}.bias"] = Cut(0, (range(size),) if rank == 0 else (Zeros(size),))
    return found


def _attention(path: str, module: Any, group: KVGroup, rank: int, ranks: int) -> Shard | None:
    """Return an attention module's part; None if the module has another form."""
    out_name = next((name for name in _OUT if _linear(module, name) is not None), None)
    if out_name is None or getattr(module, "layer_idx", None) is None:
        return None
    out = getattr(module, out_name)
    num_heads, rest = divmod(out.in_features, group.value_dim)
    if rest or num_heads % group.num_kv_heads:
        return None
    heads = heads_of(num_heads, group.num_kv_heads, rank, ranks)
    wide = (group.head_dim, group.head_dim, group.value_dim)
    cuts: dict[str, Cut] = {}
    joined = next((name for name in _JOINED_QKV if _linear(module, name) is not None), None)
    if joined is not None:
        linear, start = getattr(module, joined), 0
        pieces: list[Piece] = []
        for own, count, width in zip(
            (heads.queries, heads.keys, heads.keys), (num_heads, *(group.num_kv_heads,) * 2), wide, strict=True
        ):
            pieces += blocks(own, width, start)
            start += count * width
        if start != linear.out_features:
            return None
        cuts |= _columns(f"{path}.{joined}", linear, Cut(0, tuple(pieces)))
        names = {joined}
    else:
        triple = next((names for names in _QKV if _linear(module, names[0]) is not None), None)
        if triple is None:
            return None
        names = set()
        for index, name in enumerate(triple):
            linear = _linear(module, name)
            # Layers that read another layer's keys and values have none of their own.
            if linear is None:
                continue
            own, count = (heads.queries, num_heads) if index == 0 else (heads.keys, group.num_kv_heads)
            width, rest = divmod(linear.out_features, count)
            # Queries may come with as wide a gate for each head.
            if rest or width not in (wide[index], *((2 * wide[0],) if index == 0 else ())):
                return None
            cuts |= _columns(f"{path}.{name}", linear, Cut(0, blocks(own, width)))
            names.add(name)
    cuts |= _rows(f"{path}.{out_name}", out, Cut(1, blocks(heads.queries, group.value_dim)), rank)
    sinks = getattr(module, _SINKS, None)
    if isinstance(sinks, nn.Parameter) and sinks.numel() == num_heads:
        cuts[f"{path}.{_SINKS}"] = Cut(0, blocks(heads.queries, 1))
        names.add(_SINKS)
    if not _only(module, names | {out_name}, group.head_dim):
        return None
    own_q, own_kv = len(heads.queries), len(heads.keys)
    sizes = {
        "num_heads": (num_heads, own_q),
        "num_attention_heads": (num_heads, own_q),
        "num_key_value_heads": (group.num_kv_heads, own_kv),
        "num_kv_heads": (group.num_kv_heads, own_kv),
        "num_key_value_groups": (num_heads // group.num_kv_heads, own_q // own_kv),
    }
    return Shard(path, cuts, f"{path}.{out_name}", heads, _changed(module, sizes))


def _changed(module: Any, sizes: Mapping[str, tuple[int, int]]) -> dict[str, int]:
    """Return the attributes of a module that hold a size of the whole, with the part's size."""
    return {name: own for name, (size, own) in sizes.items() if getattr(module, name, None) == size}


def _mlp(path: str, module: Any, rank: int, ranks: int) -> Shard | None:
    """Return an MLP's part; None if the module has another form."""
    for ups, down_name in _MLPS:
        down, linears = _linear(module, down_name), [_linear(module, name) for name in ups]
        if down is None or any(linear is None for linear in linears):
            continue
        inner = down.in_features
        count = 2 if ups == (_JOINED_GATE,) else 1
        # A sparse activation compares all inner units with each other.
        if not _only(module, {*ups, down_name}) or getattr(module, "activation_sparsity", None):
            return None
        cuts: dict[str, Cut] = {}
        parts: dict[str, int] = {}
        for name, linear in zip(ups, linears, strict=True):
            assert linear is not None
            if linear.out_features != count * inner:
                return None
            made = _columns(f"{path}.{name}", linear, Cut(0, sections(count, inner, rank, ranks)))
            cuts |= made
            parts |= dict.fromkeys(made, count)
        cuts |= _rows(f"{path}.{down_name}", down, Cut(1, share(inner, rank, ranks)), rank)
        return Shard(path, cuts, f"{path}.{down_name}", num_sections=parts)
    return None


def _experts(path: str, module: Any, rank: int, ranks: int) -> Shard | None:
    """Return a part of each of a module's experts; None if the module has another form."""
    if not usual_form(module) or not _only(module, {"gate_up_proj", "down_proj"}):
        return None
    inner_dim = 1 if module.is_transposed else 2
    inner = module.down_proj.shape[inner_dim]
    if module.gate_up_proj.shape[3 - inner_dim] != 2 * inner:
        return None
    cuts = {
        f"{path}.gate_up_proj": Cut(3 - inner_dim, sections(2, inner, rank, ranks)),
        f"{path}.down_proj": Cut(inner_dim, share(inner, rank, ranks)),
    }
    own = cuts[f"{path}.down_proj"].size
    names = ("intermediate_dim", "intermediate_size", "expert_dim", "moe_intermediate_size")
    sizes = _changed(module, dict.fromkeys(names, (inner, own)))
    return Shard(path, cuts, path, sizes=sizes, num_sections={f"{path}.gate_up_proj": 2})


def _vocabulary(model: Any, rank: int, ranks: int) -> tuple[Shard, tuple[str, int], str, int] | None:
    """Return the part of the embedding and the head; None if one of them has another form."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(embedding, nn.Embedding) or type(head) is not nn.Linear:
        return None
    size = embedding.num_embeddings
    if head.out_features != size or len(list(embedding.parameters())) != 1:
        return None
    names = {id(module): name for name, module in model.named_modules()}
    if id(embedding) not in names or id(head) not in names:
        return None
    pieces = share(size, rank, ranks)
    cut = Cut(0, pieces)
    cuts = {f"{names[id(embedding)]}.weight": cut} | _columns(names[id(head)], head, cut)
    shard = Shard("vocabulary", cuts)
    return shard, (names[id(embedding)], min(rank * cut.size, size)), names[id(head)], size
