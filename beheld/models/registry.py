"""Makes the adapter that runs an architecture."""

from __future__ import annotations

from typing import Any

from beheld.attention.select import select_tower
from beheld.core.config import EngineConfig, ModelInfo
from beheld.families import registry as families
from beheld.models.adapter import ModelAdapter
from beheld.parallel.group import RankGroup
from beheld.platform.registry import platform_of

_SMALLER = "Take a quantized or a smaller checkpoint, or a device with more memory."


def build(
    hf_config: Any,
    info: ModelInfo,
    config: EngineConfig,
    ranks: RankGroup | None = None,
    piped: RankGroup | None = None,
) -> ModelAdapter:
    """Load the model of `info`, or this rank's part of it, and wrap it in its adapter.

    The adapter's `info` counts only this rank's key-value heads.

    Raises:
        ModelError: it cannot run; the message gives the reason.
        CapacityError: there is not enough memory for its weights.
    """
    from beheld.models.encoder import EncoderAdapter
    from beheld.models.hf import HFAdapter
    from beheld.models.load import load_model
    from beheld.models.out_of_memory import explained
    from beheld.models.surgery.operations import operations_of
    from beheld.models.two_towers import TwoTowersAdapter

    platform = platform_of(config.device)
    with explained("load the weights", platform, _SMALLER):
        surgery = load_model(hf_config, info, config, ranks, piped)
    if surgery.target.shards is not None:
        info = surgery.target.shards.local(info)
    with explained("join and arrange the weights", platform, _SMALLER):
        windows = select_tower(platform, config.attention_backend)
        surgery.perform(operations_of(info))
        if info.pooler is not None and info.pooler.encodes:
            two = families.model(info.family).text_vectors is not None
            return TwoTowersAdapter(surgery, info, windows) if two else EncoderAdapter(surgery, info, windows)
        return HFAdapter(surgery, info, windows)
