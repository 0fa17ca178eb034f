"""The fixed order of surgery on a loaded model: quantize, shard, fuse, LoRA, compile; so far, fuse and compile."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from beheld.attention.op import number_layers
from beheld.core.config import EngineConfig
from beheld.models.fuse import (
    PackedLinear,
    SmallBatchLinear,
    can_pack,
    compile_layers,
    fuse_linears,
    replace_linears,
)
from beheld.utils import env
from beheld.utils.log import get_logger

logger = get_logger(__name__)


def prepare(model: Any, config: EngineConfig) -> Any:
    """Make a loaded transformers model fast on its device; returns the same model."""
    if config.enforce_eager:
        return model
    if config.device == "cpu":
        if config.dtype == "float32":
            kind = PackedLinear if can_pack() else SmallBatchLinear
            logger.debug("%d linear layers are now %s.", replace_linears(model, kind), kind.__name__)
        return model
    if config.dtype == "float32":
        # Convolutions would run in TF32 otherwise, whose ten bits are not what float32 was asked for.
        torch.backends.cudnn.allow_tf32 = False
    text = text_model(model)
    if env.FUSE():
        logger.info("Fused %d groups of linear layers.", fuse_linears(text))
    if env.COMPILE():
        number_layers(text)
        compile_layers(text.layers)
    return model


def text_model(model: Any) -> Any:
    """The part of a transformers model that holds the decoder layers."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    layers = getattr(decoder, "layers", None)
    assert isinstance(layers, nn.ModuleList), f"{type(decoder).__name__} keeps its layers elsewhere"
    return decoder
