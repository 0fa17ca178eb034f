"""Llama 4: pictures pass a projector behind the tower, and layers without positions scale their queries by position.

Shapes: T tokens of a step, V picture tiles, P embeddings of a tile, H hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def adapt(model: Any) -> None:
    """Let attention scale the queries, see `keywords`: a layer counts from zero, whoever's tokens it is given."""
    for layer in model.get_decoder().model.layers:
        attention = layer.self_attn
        if attention.attn_temperature_tuning and not attention.use_rope:
            attention.attn_temperature_tuning = False
            attention.scales_queries = True


def keywords(model: Any, positions_1T: Tensor) -> dict[str, Any]:
    """`query_scale` (1, 1, T, 1): queries grow with the logarithm of the stretches of `floor_scale` behind them.

    As transformers computes it, in float32, from https://arxiv.org/abs/2501.19399.
    """
    text = model.config.get_text_config()
    if not text.attn_temperature_tuning:
        return {}
    stretches_1T = torch.floor((positions_1T.float() + 1.0) / text.floor_scale)
    scale_1T = torch.log1p(stretches_1T) * text.attn_scale + 1.0
    return {"query_scale": scale_1T.view(1, 1, -1, 1)}


def embeds(model: Any, result: Any) -> Tensor:
    """What the projector makes of a tower's result (V, P, *): (V, P, H)."""
    projected: Tensor = model.multi_modal_projector(result.last_hidden_state)
    return projected
