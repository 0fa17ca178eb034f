"""From an architecture to the adapter that runs it."""

from __future__ import annotations

from typing import Any

from beheld.attention.select import select_tower
from beheld.core.config import EngineConfig, ModelInfo
from beheld.models.adapter import ModelAdapter

_SMALLER = "Take a quantized or a smaller checkpoint, or a device with more memory."


def build(hf_config: Any, info: ModelInfo, config: EngineConfig) -> ModelAdapter:
    """Load the model of `info` and wrap it.

    Raises:
        ModelError: it cannot be run; the message says why.
        CapacityError: the memory does not suffice for its weights.
    """
    from beheld.models.hf import HFAdapter
    from beheld.models.load import load_model
    from beheld.models.prepare import prepare
    from beheld.models.shortage import told

    with told("load the weights", config.device, _SMALLER):
        model = load_model(hf_config, info, config)
    with told("join and arrange the weights", config.device, _SMALLER):
        windows = select_tower(config.device, config.attention_backend)
        return HFAdapter(model, info, prepare(model, info, config), windows)
