"""The fixed order of surgery on a loaded model: adapt, quantize, shard, fuse, LoRA, compile; so far, without two."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from beheld.attention.op import number_layers
from beheld.core.config import EngineConfig, ModelInfo
from beheld.families import registry
from beheld.lora.slots import LoRASlots
from beheld.models.carry import attach
from beheld.models.cross import crosses
from beheld.models.experts import replace_experts
from beheld.models.fuse import (
    PackedLinear,
    PaddedLinear,
    SmallBatchLinear,
    can_pack,
    compile_layers,
    pad_mlps,
    replace_linears,
    replace_patch_convolutions,
)
from beheld.models.joined import fuse_linears
from beheld.models.longrope import settle
from beheld.models.one_row import OneRowLinear
from beheld.models.patches import pack_patch_convolutions
from beheld.platform.registry import platform_of
from beheld.utils import env
from beheld.utils.log import get_logger

logger = get_logger(__name__)

# Fewer like layers than this are not worth a compiler's time.
_STACK = 4
# What most text models have before and behind their layers: about ten kernels each, of a microsecond or two.
_AROUND = ("rotary_emb", "norm")


def prepare(model: Any, info: ModelInfo, config: EngineConfig) -> LoRASlots | None:
    """Make a loaded transformers model fast on its device, and able to carry adapters if it is to; returns their slots.

    Raises:
        ConfigError: it is to carry adapters, and no layer can.
    """
    platform = platform_of(config.device)
    if config.dtype == "float32":
        platform.exact_float32()
    adapt = registry.model(info.family).adapt
    if adapt is not None:
        adapt(model)
    settle(model.get_decoder() if hasattr(model, "get_decoder") else model)
    if not config.enforce_eager:
        _fuse(model, config)
    slots = None if config.max_loras == 0 else attach(model, text_model(model), config)
    if not config.enforce_eager and platform.compiles_layers and env.COMPILE():
        text = text_model(model)
        number_layers(text)
        # Layers that attend beside the text find what they need in the forward context, which no compiler looks into.
        compile_layers([layer for layer in text.layers if not crosses(layer)])
        for around in (getattr(text, name, None) for name in _AROUND):
            if isinstance(around, nn.Module):
                # With many rows they weigh little, and each order of positions in memory would be compiled apart.
                compile_layers([around], for_many=False, level=logging.DEBUG)
        # Nor are their towers compiled: BART's encoder looks at its own numbers in float16, which no graph can hold.
        for blocks in () if crosses(text) else tower_blocks(model, text):
            compile_layers(list(blocks))
    return slots


def _fuse(model: Any, config: EngineConfig) -> None:
    """Linear layers in the form that the device computes fastest."""
    dtype = getattr(torch, config.dtype)
    if platform_of(config.device).packs_linears:
        if dtype == torch.float32:
            _pack(model, dtype)
        else:
            logger.debug("%d linear layers are padded.", replace_linears(model, PaddedLinear, dtype))
        return
    if env.FUSE():
        text = text_model(model)
        padded = pad_mlps(model, text if config.max_loras else None)
        logger.debug("Padded %d MLPs, replaced %d convolutions.", padded, replace_patch_convolutions(model))
        logger.info("Fused %d groups of linear layers.", fuse_linears(model))
        _ready_for_one_row(model, text, dtype)


def _pack(model: Any, dtype: torch.dtype) -> None:
    """The products of a CPU. Experts and what is fused come first: their layers are packed with the others."""
    kind = PackedLinear if can_pack() else SmallBatchLinear
    if env.FUSE():
        # Only there: towers have many rows at once, for which a call more is nothing.
        logger.debug("Fused %d groups of linear layers.", fuse_linears(text_model(model)))
    logger.debug("%d sets of experts are now layers.", replace_experts(model, dtype))
    if kind is PackedLinear:
        logger.debug("%d convolutions are now products.", pack_patch_convolutions(model, dtype))
    logger.debug("%d linear layers are now %s.", replace_linears(model, kind, dtype), kind.__name__)


def _ready_for_one_row(model: Any, text: Any, dtype: torch.dtype) -> None:
    if dtype == torch.float32:
        return
    replace_linears(text, OneRowLinear, dtype)
    head = model.get_output_embeddings()
    if type(head) is nn.Linear:
        model.set_output_embeddings(OneRowLinear(head))


def tower_blocks(model: nn.Module, text: nn.Module) -> list[nn.ModuleList]:
    """The stacks of like layers outside the text model: the blocks of towers."""
    inside = set(text.modules())
    stacks = [m for m in model.modules() if isinstance(m, nn.ModuleList) and m not in inside]
    return [stack for stack in stacks if len(stack) >= _STACK and len({type(layer) for layer in stack}) == 1]


def text_model(model: Any) -> Any:
    """The part of a transformers model that holds the decoder layers."""
    decoder, outer = model, None
    # A language model inside another has a decoder of its own.
    while not hasattr(decoder, "layers") and hasattr(decoder, "get_decoder") and decoder is not outer:
        decoder, outer = decoder.get_decoder(), decoder
    if not hasattr(decoder, "layers"):
        # Llama 4's language model is its own decoder, around the one with the layers.
        decoder = getattr(decoder, "model", decoder)
    if not hasattr(decoder, "layers"):
        # Some name encoder and decoder together so.
        decoder = getattr(decoder, "decoder", decoder)
    layers = getattr(decoder, "layers", None)
    assert isinstance(layers, nn.ModuleList), f"{type(decoder).__name__} keeps its layers elsewhere"
    return decoder
