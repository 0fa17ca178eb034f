"""DeepSeek-V3 and R1, Kimi-K2: text only; latent attention, experts chosen by groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from beheld.families.family import Family, KnownCheckpoint


def _kimi_k2(raw: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Kimi-K2 is a DeepSeek-V3 of other sizes, under a model type of its own."""
    return "deepseek_v3", {name: value for name, value in raw.items() if name not in ("model_type", "auto_map")}


FAMILY = Family(
    model_types=("deepseek_v3", "kimi_k2"),
    tested=(
        KnownCheckpoint(
            "deepseek_v3",
            "DeepseekV3ForCausalLM",
            "deepseek-ai/DeepSeek-V3",
            note="latent attention (MLA); experts; DeepSeek's FP8 weights are dequantized as they are loaded",
            on_gpu=True,
        ),
    ),
    convert={"kimi_k2": _kimi_k2},
    calls=("deepseek_v3", "kimi_k2", "gigachat3"),
    reasoning=("think",),
)
