"""Finds which weights of a model ranks share out: attention heads, inner units, experts, the vocabulary.

Modules are known by their form: the names of their linear layers and the sizes of their weights. A module that has
anything else with weights is computed whole by every rank, which is as right and only takes more memory.

Shapes: H hidden size, I an MLP's inner size, E experts, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import nn

from beheld.core.config import ModelInfo
from beheld.core.errors import ModelError
from beheld.models.shard_forms import changed, columns, linear_in, only, only_batched, rows
from beheld.models.shard_mixers import mixer
from beheld.models.shard_towers import tower_attention, tower_modules
from beheld.models.surgery.experts import usual_form
from beheld.models.surgery.parts import text_model
from beheld.parallel.shard_plan import Shard, ShardPlan
from beheld.parallel.shards import Cut, Zeros, pairs, sections, share

# Of an MLP: layers to the inner units, of each of which the layer back takes all, and the layer back.
_MLPS = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("w1", "w3"), "w2"),
    (("up_proj",), "down_proj"),
    (("fc1",), "fc2"),
    (("linear_fc1",), "linear_fc2"),
    (("c_fc",), "c_proj"),
    (("gate_up_proj",), "down_proj"),
)
_JOINED_GATE = "gate_up_proj"
# What modules of experts call their inner size.
_INNER_SIZES = ("intermediate_dim", "intermediate_size", "expert_dim", "moe_intermediate_size")


def find(
    model: Any, info: ModelInfo, rank: int, ranks: int, *, whole_experts: bool = False, towers: bool = False
) -> ShardPlan:
    """Return what this rank holds of a model, whose weights are whole and may be on the meta device.

    Args:
        whole_experts: experts are shared out whole where their number divides.
        towers: whether towers are shared out as well, as far as their form is known.
    """
    if info.pooler is not None and info.pooler.encodes:
        return ShardPlan(rank, ranks, (), whole=("all layers, which are an encoder's",))
    try:
        text = text_model(model)
    except ModelError:
        return ShardPlan(rank, ranks, (), whole=("all layers, which have another form",))
    prefix = next(name for name, module in model.named_modules() if module is text)
    paths = {
        number: f"{prefix}.layers.{number}" if prefix else f"layers.{number}" for number in range(len(text.layers))
    }
    found, whole = _mixers(model, info, paths, rank, ranks)
    experts = 0
    inside = tuple(f"{shard.path}." for shard in found)
    for number, layer in enumerate(text.layers):
        for name, module in layer.named_modules(prefix=paths[number]):
            if not f"{name}.".startswith(inside or ("\0",)):
                shard = (_some_experts(name, module, rank, ranks) if whole_experts else None) or _experts(
                    name, module, rank, ranks
                )
                shard = shard or _further_experts(name, module, rank, ranks) or _mlp(name, module, rank, ranks)
                if shard is not None:
                    found.append(shard)
                elif not isinstance(module, nn.Conv1d):
                    # Only experts have weights of three dimensions.
                    experts += any(weight.dim() == 3 for weight in module.parameters(recurse=False))
    if experts:
        whole.append(f"{experts} modules of experts, which have another form")
    found += _towers(model, text, rank, ranks) if towers else []
    vocabulary = _vocabulary(model, rank, ranks)
    if vocabulary is None:
        whole.append("the vocabulary")
    plan = ShardPlan(rank, ranks, tuple(found), whole=tuple(whole))
    if vocabulary is not None:
        shard, embedding, head, size = vocabulary
        plan = dataclasses.replace(plan, shards=(*plan.shards, shard), embedding=embedding, head=head, vocab_size=size)
    return plan


def _mixers(
    model: Any, info: ModelInfo, paths: Mapping[int, str], rank: int, ranks: int
) -> tuple[list[Shard], list[str]]:
    """Return the parts of what keeps a cache, group by group, and which groups are whole, in words."""
    found: list[Shard] = []
    whole: list[str] = []
    forms: dict[str, tuple[int, int, int]] = {}
    for index, group in enumerate(info.kv_groups):
        layers = (*group.layers, *(reader for reader, _ in group.readers))
        parts = [
            [
                shard
                for name, module in model.get_submodule(paths[layer]).named_modules(prefix=paths[layer])
                if (shard := mixer(name, module, index, group, rank, ranks)) is not None
            ]
            for layer in layers
        ]
        form = (group.num_kv_heads, group.head_dim, group.value_dim)
        if all(len(own) == 1 and forms.get(own[0].path, form) == form for own in parts):
            # A module that attends to positions and to states by one softmax is in two groups, and is cut once.
            found += [_cache_alone(own[0]) if own[0].path in forms else own[0] for own in parts]
            forms |= {own[0].path: form for own in parts}
        else:
            whole.append(
                f"layers {min(layers)} to {max(layers)} of one kind, {len(layers)} in all, which have another form"
            )
    return found, whole


def _towers(model: Any, text: Any, rank: int, ranks: int) -> list[Shard]:
    """Return the parts of the layers of towers."""
    found: list[Shard] = []
    for name, module in tower_modules(model, text):
        shard = tower_attention(name, module, rank, ranks)
        if shard is None and (mlp := _mlp(name, module, rank, ranks)) is not None:
            shard = dataclasses.replace(mlp, tower=True)
        if shard is not None:
            found.append(shard)
    return found


def _cache_alone(shard: Shard) -> Shard:
    return Shard(shard.path, {}, cache=shard.cache)


def _mlp(path: str, module: Any, rank: int, ranks: int) -> Shard | None:
    """Return an MLP's part; None if the module has another form."""
    for ups, down_name in _MLPS:
        down, linears = linear_in(module, down_name), [linear_in(module, name) for name in ups]
        if down is None or any(linear is None for linear in linears):
            continue
        inner = down.in_features
        count = 2 if ups == (_JOINED_GATE,) else 1
        # A sparse activation compares all inner units with each other.
        if not only(module, {*ups, down_name}) or getattr(module, "activation_sparsity", None):
            return None
        cuts: dict[str, Cut] = {}
        parts: dict[str, int] = {}
        for name, linear in zip(ups, linears, strict=True):
            assert linear is not None
            if linear.out_features != count * inner:
                return None
            made = columns(f"{path}.{name}", linear, Cut(0, sections(count, inner, rank, ranks)))
            cuts |= made
            parts |= dict.fromkeys(made, count)
        cuts |= rows(f"{path}.{down_name}", down, Cut(1, share(inner, rank, ranks)), rank)
        return Shard(path, cuts, f"{path}.{down_name}", num_sections=parts)
    return None


def _some_experts(path: str, module: Any, rank: int, ranks: int) -> Shard | None:
    """Return some of a module's experts, whole; None if the module has another form, or they do not divide."""
    if not usual_form(module) or not only(module, {"gate_up_proj", "down_proj"}):
        return None
    each, rest = divmod(len(module.down_proj), ranks)
    if rest:
        return None
    own = range(rank * each, (rank + 1) * each)
    cuts = {f"{path}.{name}": Cut(0, (own,)) for name in ("gate_up_proj", "down_proj")}
    sizes = changed(module, {"num_experts": (each * ranks, each)})
    return Shard(path, cuts, path, sizes=sizes, experts=own)


def _experts(path: str, module: Any, rank: int, ranks: int) -> Shard | None:
    """Return a part of each of a module's experts; None if the module has another form."""
    if not usual_form(module) or not only(module, {"gate_up_proj", "down_proj"}):
        return None
    inner_dim = 1 if module.is_transposed else 2
    inner = module.down_proj.shape[inner_dim]
    if module.gate_up_proj.shape[3 - inner_dim] != 2 * inner:
        return None
    # PyTorch's grouped product takes only rows in multiples of 16 bytes.
    unit = min(8, 16 // module.down_proj.element_size())
    cuts = {
        f"{path}.gate_up_proj": Cut(3 - inner_dim, sections(2, inner, rank, ranks, unit)),
        f"{path}.down_proj": Cut(inner_dim, share(inner, rank, ranks, unit)),
    }
    own = cuts[f"{path}.down_proj"].size
    sizes = changed(module, dict.fromkeys(_INNER_SIZES, (inner, own)))
    return Shard(path, cuts, path, sizes=sizes, num_sections={f"{path}.gate_up_proj": 2})


def _further_experts(path: str, module: Any, rank: int, ranks: int) -> Shard | None:
    """Return a part of each of a module's experts of two further forms; None if the module has neither.

    Those that declare a gate and biases, gate and up of a unit side by side or in two sections; and those of which all
    compute as many rows, in one product (Llama 4).
    """
    names = {"gate_up_proj", "down_proj"}
    gate_up, down = (getattr(module, name, None) for name in ("gate_up_proj", "down_proj"))
    if not all(isinstance(each, nn.Parameter) and each.dim() == 3 for each in (gate_up, down)):
        return None
    assert gate_up is not None
    assert down is not None
    inner = down.shape[1]
    transposed = gate_up.shape[0] == down.shape[0] and gate_up.shape[1:] == (down.shape[2], 2 * inner)
    if not transposed:
        return None
    biased = getattr(module, "has_gate", False) and getattr(module, "is_transposed", False)
    biased = biased and getattr(module, "has_bias", False)
    if biased:
        names |= {f"{name}_bias" for name in names}
    elif not only_batched(module):
        return None
    if not only(module, names):
        return None
    unit = min(8, 16 // down.element_size())
    own = share(inner, rank, ranks, unit)
    both = sections(2, inner, rank, ranks, unit)
    if biased and not getattr(module, "is_concatenated", True):
        both = pairs(own)
    cuts = {f"{path}.gate_up_proj": Cut(2, both), f"{path}.down_proj": Cut(1, own)}
    if biased:
        size = down.shape[2]
        # One rank adds it.
        whole = (range(size),) if rank == 0 else (Zeros(size),)
        cuts |= {f"{path}.gate_up_proj_bias": Cut(1, both), f"{path}.down_proj_bias": Cut(1, whole)}
    sizes = changed(module, dict.fromkeys(_INNER_SIZES, (inner, cuts[f"{path}.down_proj"].size)))
    joined = {} if biased and not getattr(module, "is_concatenated", True) else {f"{path}.gate_up_proj": 2}
    return Shard(path, cuts, path, sizes=sizes, num_sections=joined)


def _vocabulary(model: Any, rank: int, ranks: int) -> tuple[Shard, tuple[str, int], str, int] | None:
    """Return the part of the embedding and the head; None if one of them has another form."""
    try:
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    except (NotImplementedError, AttributeError):
        return None
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
    cuts = {f"{names[id(embedding)]}.weight": cut} | columns(names[id(head)], head, cut)
    # transformers would put the whole table of a third module back in the place of the cut one.
    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", {})
    if any((target in cuts) != (source in cuts) for target, source in tied.items()):
        return None
    shard = Shard("vocabulary", cuts)
    return shard, (names[id(embedding)], min(rank * cut.size, size)), names[id(head)], size
