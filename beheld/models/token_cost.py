"""What a token costs a model: the weights that it is multiplied with."""

from __future__ import annotations

from typing import Any

from torch import nn

from beheld.core.config import TokenCost
from beheld.core.errors import ModelError
from beheld.models.surgery.parts import text_model

# What a configuration may call the number of experts that a token chooses.
_CHOSEN = ("num_experts_per_tok", "top_k_experts", "moe_topk", "num_experts_per_token")


def token_cost(model: Any) -> TokenCost | None:
    """Return the cost by a model that may be on the meta device.

    Returns:
        None if its text model is of another form, or it does not say how many experts a token chooses.
    """
    try:
        layers = text_model(model).layers
        head = model.get_output_embeddings()
    except (ModelError, AttributeError, NotImplementedError):
        return None
    read = products = 0.0
    experts = False
    for layer in layers:
        for module in layer.modules():
            share: float | None = 1.0
            if _are_experts(module):
                experts, share = True, _chosen(module, model.config.get_text_config())
            if share is None:
                return None
            for parameter in module.parameters(recurse=False):
                read += parameter.nbytes * share
                products += parameter.numel() * share
    if head is not None:
        read += sum(parameter.nbytes for parameter in head.parameters())
    return TokenCost(int(read), int(products), experts)


def _are_experts(module: Any) -> bool:
    # Only they have weights of three dimensions, whatever their form.
    return not isinstance(module, nn.Conv1d) and any(each.dim() == 3 for each in module.parameters(recurse=False))


def _chosen(experts: Any, config: Any) -> float | None:
    """Return which share of a module's experts a token is multiplied with; None if the configuration does not say."""
    chosen = next((getattr(config, name) for name in _CHOSEN if getattr(config, name, None)), None)
    count = next(len(weight) for weight in experts.parameters(recurse=False) if weight.dim() == 3)
    return None if chosen is None else min(1.0, chosen / count)
