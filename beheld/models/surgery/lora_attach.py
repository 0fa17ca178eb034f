"""Adds LoRA support to the linear layers of a loaded model's decoder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from beheld.core.config import EngineConfig
from beheld.core.errors import ConfigError
from beheld.lora.layers import LoRALinear, Switch
from beheld.lora.load import Form, Site
from beheld.lora.slots import LoRASlots
from beheld.models.cross import CrossAttention
from beheld.models.one_row import StandIn
from beheld.models.surgery.joined import FirstOfFused
from beheld.models.surgery.linears import PackedLinear
from beheld.models.surgery.lora_names import PublishedNames
from beheld.models.surgery.operation import Changes, Target
from beheld.models.surgery.parts import text_model
from beheld.models.surgery.vector_linear import VectorLinear
from beheld.parallel.shard_plan import ShardPlan
from beheld.quant.linear import StoredLinear
from beheld.utils.log import get_logger

logger = get_logger(__name__)

_LINEARS = (PackedLinear, StandIn, StoredLinear, VectorLinear)
_APART = frozenset({"experts", "cross_attn", "crossattention", "encoder_attn"})
# Paths of the decoder in this and older versions of transformers; adapters keep the names of the version that trained
# them.
_PREFIXES = (
    "model.language_model.",
    "model.language_model.model.",
    "language_model.model.",
    "model.text_model.",
    "model.",
)


def attach_slots(target: Target, changes: Changes) -> None:
    """Give the target slots for adapters, which the linear layers of its decoder add.

    Raises:
        ConfigError: there is no such layer.
    """
    target.slots = attach(target.model, text_model(target.model), target.config, changes, target.shards)


def attach(
    model: Any, decoder: nn.Module, config: EngineConfig, changes: Changes, shards: ShardPlan | None = None
) -> LoRASlots:
    """Replace each linear layer of the decoder by a LoRALinear; they share the returned slots.

    Experts and cross-attention are left out: they see other rows than the step's tokens.

    Args:
        shards: what this rank holds of the layers; None if it holds all.

    Raises:
        ConfigError: there is no such layer.
    """
    switch, dtype = Switch(), getattr(torch, config.dtype)
    own = next(name for name, module in model.named_modules() if module is decoder)
    path = f"{own}." if own else ""
    layers: list[LoRALinear] = []
    sites: dict[str, Site] = {}
    for parent, attribute, names, sizes in list(_linears(decoder)):
        base = getattr(parent, attribute)
        layer = LoRALinear(
            base,
            names,
            sizes,
            max_loras=config.max_loras,
            max_rank=config.max_lora_rank,
            dtype=dtype,
            device=next(model.parameters()).device,
            switch=switch,
        )
        changes.replace(parent, attribute, layer, lambda made: made.base)  # type: ignore[arg-type, return-value]
        layers.append(layer)
        sites |= {
            name: _site(name, layer.in_features, size, f"{path}{name}.weight", shards)
            for name, size in zip(names, sizes, strict=True)
        }
    if not sites:
        raise ConfigError(f"No layer of {type(model).__name__} can carry an adapter.", param="enable_lora")
    prefixes = tuple(dict.fromkeys([path, *_PREFIXES]))
    logger.info("%d linear layers can carry LoRA adapters.", len(sites))
    return LoRASlots(
        layers,
        Form(sites, prefixes, config.max_lora_rank, dtype, PublishedNames(model).parts),
        max_loras=config.max_loras,
        max_host=config.max_cpu_loras,
        switch=switch,
    )


def _site(name: str, num_inputs: int, num_outputs: int, weight: str, shards: ShardPlan | None) -> Site:
    """Return a layer's site: the sizes of the whole layer, and this rank's part of it."""
    cut = None if shards is None else shards.cuts.get(weight)
    if shards is None or cut is None:
        return Site(name, num_inputs, num_outputs)
    num_outputs, num_inputs = shards.shapes[weight]
    return Site(name, num_inputs, num_outputs, cut)


def _linears(decoder: nn.Module) -> Iterator[tuple[nn.Module, str, list[str], list[int]]]:
    """List the linear layers: parent, attribute, and the names and outputs of the layers that each represents."""
    crossing: tuple[str, ...] = ()
    for path, parent in decoder.named_modules():
        if not path.startswith("layers.") or not _APART.isdisjoint(path.split(".")):
            continue
        if isinstance(parent, CrossAttention):
            # Under whatever name a family has it.
            crossing = *crossing, f"{path}."
        if f"{path}.".startswith(crossing):
            continue
        if isinstance(parent, FirstOfFused):
            above = path.rpartition(".")[0]
            yield parent, "product", [f"{above}.{name}" for name in parent.names], parent.sizes
            continue
        for attribute, child in parent.named_children():
            if (type(child) is nn.Linear or isinstance(child, _LINEARS)) and attribute != "product":
                yield parent, attribute, [f"{path}.{attribute}"], [child.out_features]
