"""From an architecture to the adapter that runs it."""

from __future__ import annotations

import importlib
from typing import Any

from beheld.attention.select import select_tower
from beheld.core.config import EngineConfig, ModelInfo
from beheld.models.adapter import ModelAdapter

# Architectures with a definition of our own; every other one goes through transformers.
OWN: dict[str, str] = {}

_SMALLER = "Take a quantized or a smaller checkpoint, or a device with more memory."


def build(hf_config: Any, info: ModelInfo, config: EngineConfig) -> ModelAdapter:
    """Load the model of `info` and wrap it.

    Raises:
        ModelError: it cannot be run; the message says why.
        CapacityError: the memory does not suffice for its weights.
    """
    own = OWN.get(info.architecture)
    if own is not None:
        module, name = own.split(":")
        adapter: ModelAdapter = getattr(importlib.import_module(module), name)(hf_config, info, config)
        return adapter
    from beheld.models.hf import HFAdapter
    from beheld.models.load import load_model
    from beheld.models.prepare import prepare
    from beheld.models.shortage import told

    with told("load the weights", config.device, _SMALLER):
        surgery = load_model(hf_config, info, config)
    with told("join and arrange the weights", config.device, _SMALLER):
        windows = select_tower(config.device, config.attention_backend)
        prepare(surgery)
        return HFAdapter(surgery, info, windows)
