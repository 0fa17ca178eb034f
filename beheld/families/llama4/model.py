"""Llama 4: images pass a projector after the tower, and layers without positions scale their queries by position.

On a GPU in bfloat16, only a token's chosen experts are computed; transformers computes all of them.

Shapes: T tokens of a step, V image tiles, P embeddings of a tile, H hidden size, K experts of a token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

from beheld.families.model import FamilyModel
from beheld.models.surgery.experts import GroupedExperts, can_group, experts_of
from beheld.models.surgery.operation import Changes
from beheld.platform.registry import platform_of


class ChosenExperts(nn.Module):
    """The model's expert block, computing only chosen experts.

    An expert's input is the token times a score that is zero for experts not chosen, and an expert without biases maps
    zero to zero, so skipping it changes nothing.
    """

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.top_k: int = block.top_k
        self.router = block.router
        self.shared_expert = block.shared_expert
        old = block.experts
        weights = old.gate_up_proj.data, old.down_proj.data
        if platform_of(weights[0].device).synchronous:
            self.experts: nn.Module = experts_of(*weights, old.act_fn, transposed=True)
        else:
            self.experts = GroupedExperts(*weights, old.act_fn)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, None]:
        """Apply hidden_states (1, T, H) -> (T, H), the block's format, and no router logits."""
        x_TH = hidden_states.flatten(0, 1)
        logits_TE = nn.functional.linear(x_TH, self.router.weight)
        best_TK, experts_TK = logits_TE.topk(self.top_k, dim=1)
        scores_TK = torch.sigmoid(best_TK.float()).to(x_TH.dtype)
        # The score applies before the expert, so every choice of a token is a separate row.
        rows_NH = (x_TH.unsqueeze(1) * scores_TK.unsqueeze(2)).flatten(0, 1)
        made_NH = self.experts(rows_NH, experts_TK.reshape(-1, 1), torch.ones_like(scores_TK).reshape(-1, 1))
        return self.shared_expert(x_TH) + made_NH.unflatten(0, (-1, self.top_k)).sum(1), None


def adapt(model: Any, changes: Changes) -> None:
    """Let attention scale the queries, see `keywords`: a layer would count positions from zero for all sequences.

    Off a CPU, experts that cannot be grouped stay unchanged: their numbers of rows would have to be read back.
    """
    for layer in model.get_decoder().model.layers:
        if not hasattr(layer, "feed_forward"):
            # A layer of another stage.
            continue
        block = layer.feed_forward
        if isinstance(block, Llama4TextMoe):
            weights = block.experts.gate_up_proj.data, block.experts.down_proj.data
            if platform_of(weights[0].device).synchronous or can_group(*weights):
                chosen = ChosenExperts(block)
                chosen.experts.stand_for(block.experts)  # type: ignore[operator]
                changes.exchange(layer, "feed_forward", chosen, ("router", "shared_expert", "experts"))
        attention = layer.self_attn
        if attention.attn_temperature_tuning and not attention.use_rope:
            changes.set(attention, "attn_temperature_tuning", False)
            changes.set(attention, "scales_queries", True)


def keywords(model: Any, positions_1T: Tensor) -> dict[str, Any]:
    """Return `query_scale` (1, 1, T, 1), which grows with the logarithm of the number of preceding `floor_scale` spans.

    Computed in float32 as in transformers; source: https://arxiv.org/abs/2501.19399.
    """
    text = model.config.get_text_config()
    if not text.attn_temperature_tuning:
        return {}
    stretches_1T = torch.floor((positions_1T.float() + 1.0) / text.floor_scale)
    scale_1T = torch.log1p(stretches_1T) * text.attn_scale + 1.0
    return {"query_scale": scale_1T.view(1, 1, -1, 1)}


def embeds(model: Any, modality: str, result: Any) -> Tensor:
    """Project a tower's result (V, P, *): (V, P, H)."""
    projected: Tensor = model.multi_modal_projector(result.last_hidden_state)
    return projected


MODEL = FamilyModel(adapt=adapt, keywords=keywords, embeds=embeds)
