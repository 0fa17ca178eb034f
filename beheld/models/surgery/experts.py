"""Expert layers that compute only the rows that chose each expert: one by one on a CPU, grouped on a GPU.

Shapes: T tokens, K experts that a token takes, S rows (a token and one of its experts), E experts, H hidden size, I an
expert's inner size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from beheld.models.surgery.linears import replace_children
from beheld.models.surgery.operation import Changes
from beheld.platform.registry import platform_of
from beheld.quant import slots as _slots  # noqa: F401 (defines operators)
from beheld.quant.linear import linear_of

# Where the usual gate is defined: the activation of the first half, times the second half.
_USUAL_GATE = "transformers.integrations.moe"
_WEIGHTS = ("gate_up_proj", "down_proj")


class Experts(nn.Module):
    """Gated experts without biases, with one product per chosen expert.

    Args:
        ups: each expert's layer to (S, 2 I), the gate's half first.
        downs: each expert's layer back to (S, H).
        act: the gate's activation.
    """

    def __init__(self, ups: list[nn.Module], downs: list[nn.Module], act: Any) -> None:
        super().__init__()
        self.ups = nn.ModuleList(ups)
        self.downs = nn.ModuleList(downs)
        self.act_fn = act
        self.transposed = False

    def stand_for(self, shell: nn.Module) -> None:
        """Record transformers' module, which this one replaces; it loses its weights."""
        _empty(self, shell)

    def restored(self) -> nn.Module:
        """Return transformers' module with these weights."""
        both: Any = self.ups, self.downs
        weights = [torch.stack([layer.weight.data for layer in layers]) for layers in both]
        return _filled(self, [each.transpose(1, 2) if self.transposed else each for each in weights])

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Apply hidden_states (T, H), experts (T, K) and their weights (T, K) -> (T, H); expert E means none."""
        experts_S = top_k_index.reshape(-1)
        counts = torch.bincount(experts_S, minlength=len(self.ups)).tolist()[: len(self.ups)]
        # Rows in expert order; rows without an expert come last.
        order_S = experts_S.argsort(stable=True)[: sum(counts)]
        tokens_S = order_S // top_k_index.shape[1]
        y_SH = self._rows(hidden_states.index_select(0, tokens_S), counts)
        y_SH.mul_(top_k_weights.reshape(-1, 1).index_select(0, order_S).to(y_SH.dtype))
        return torch.zeros_like(hidden_states).index_add_(0, tokens_S, y_SH)

    def _rows(self, x_SH: Tensor, counts: list[int]) -> Tensor:
        """Apply x_SH in expert order, `counts` rows for each -> (S, H)."""
        chosen = [index for index, count in enumerate(counts) if count]
        if not chosen:
            return torch.empty_like(x_SH)
        sizes = [counts[index] for index in chosen]
        parts = zip(chosen, x_SH.split(sizes), strict=True)
        gate_SI, up_SI = torch.cat([self.ups[index](part) for index, part in parts]).chunk(2, dim=-1)
        parts = zip(chosen, (self.act_fn(gate_SI) * up_SI).split(sizes), strict=True)
        return torch.cat([self.downs[index](part) for index, part in parts])


def experts_of(gate_up: Tensor, down: Tensor, act: Any, *, transposed: bool) -> Experts:
    """Experts that share two tensors (E, outputs, inputs), or (E, inputs, outputs) if `transposed`."""

    def layers(weights: Tensor) -> list[nn.Module]:
        return [linear_of(weight.t() if transposed else weight) for weight in weights]

    experts = Experts(layers(gate_up), layers(down), act)
    experts.transposed = transposed
    return experts


def _empty(experts: nn.Module, shell: nn.Module) -> None:
    for name in _WEIGHTS:
        setattr(shell, name, None)
    experts.__dict__["shell"] = shell


def _filled(experts: nn.Module, weights: list[Tensor]) -> nn.Module:
    shell: nn.Module = experts.__dict__["shell"]
    for name, weight in zip(_WEIGHTS, weights, strict=True):
        setattr(shell, name, nn.Parameter(weight.contiguous(), requires_grad=False))
    return shell


class GroupedExperts(nn.Module):
    """Gated experts without biases on a GPU: one product for all rows of all experts, without synchronizing.

    Args:
        gate_up: of all experts, (E, H, 2 I), the gate's half first.
        down: of all experts, (E, I, H).
        act: the gate's activation.
    """

    def __init__(self, gate_up: Tensor, down: Tensor, act: Any) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(gate_up, requires_grad=False)
        self.down = nn.Parameter(down, requires_grad=False)
        self.act_fn = act

    def stand_for(self, shell: nn.Module) -> None:
        """Record transformers' module, which this one replaces; it loses its weights."""
        _empty(self, shell)

    def restored(self) -> nn.Module:
        """Return transformers' module with these weights."""
        return _filled(self, [self.gate_up.data, self.down.data])

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Apply hidden_states (T, H), experts (T, K) and their weights (T, K) -> (T, H)."""

        def gated(inner_SI: Tensor) -> Tensor:
            gate_SI, up_SI = inner_SI.chunk(2, dim=-1)
            out: Tensor = self.act_fn(gate_SI) * up_SI
            return out

        return grouped(hidden_states, self.gate_up, self.down, gated, top_k_index, top_k_weights)


def grouped(
    x_TH: Tensor,
    up_EHI: Tensor,
    down_EIH: Tensor,
    gated: Callable[[Tensor], Tensor],
    choices_TK: Tensor,
    shares_TK: Tensor,
) -> Tensor:
    """Apply experts that `can_group` -> (T, H), in the same order of additions each time.

    Args:
        gated: what is computed between the two products.
        choices_TK: each token's experts; E or more means none.
        shares_TK: their weights.
    """
    ops, experts = torch.ops.beheld, len(down_EIH)
    order_S, starts_E1, places_S = ops.expert_places(choices_TK, experts)
    rows_SH = x_TH.index_select(0, order_S // choices_TK.shape[1])
    ends_E = starts_E1[1:]
    # The products leave rows without an expert as they are; the sum does not read them.
    y_SH = _grouped(gated(_grouped(rows_SH, up_EHI, ends_E)), down_EIH, ends_E)
    out: Tensor = ops.expert_sum(y_SH, places_S, choices_TK, shares_TK, experts)
    return out


def can_group(*weights: Tensor) -> bool:
    """Return whether a GPU computes these experts' products in one call: bfloat16, and rows in multiples of 16 bytes.

    For other types the library reads each expert's number of rows on the host.
    """
    fits = all(w.dtype == torch.bfloat16 and w.is_contiguous() and not any(n % 8 for n in w.shape[1:]) for w in weights)
    return fits and platform_of(weights[0].device).grouped_products


def _grouped(x_SI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
    """Multiply rows in expert order, each expert's ending at `ends_E`, with its matrix."""
    out: Tensor = nn.functional.grouped_mm(x_SI, weight_EIO, offs=ends_E)
    return out


def replace_experts(model: nn.Module, dtype: torch.dtype, changes: Changes) -> int:
    """Replace transformers' experts of this type, if they have the usual form, by ours; returns how many.

    No weight is copied: operations that pack linear layers also find the experts' layers.
    """

    def made(child: Any) -> Experts | None:
        if not _usual(child, dtype):
            return None
        gate_up, down = child.gate_up_proj.data, child.down_proj.data
        experts = experts_of(gate_up, down, child.act_fn, transposed=child.is_transposed)
        experts.stand_for(child)
        return experts

    return replace_children(model, made, changes)


def usual_form(experts: Any) -> bool:
    """Return whether a module declares gated experts without biases and norms, and has their weights."""
    if not getattr(experts, "has_gate", False) or getattr(experts, "has_bias", True):
        return False
    if getattr(experts, "has_post_expert_norm", False) or not hasattr(experts, "is_transposed"):
        return False
    gate = getattr(type(experts), "_apply_gate", None)
    if getattr(gate, "__module__", None) != _USUAL_GATE:
        return False
    weights = [getattr(experts, name, None) for name in _WEIGHTS]
    return all(isinstance(w, Tensor) and w.dim() == 3 and bool(w.numel()) for w in weights)


def _usual(experts: Any, dtype: torch.dtype) -> bool:
    """Return whether they are of this type as well."""
    return usual_form(experts) and experts.gate_up_proj.dtype == experts.down_proj.dtype == dtype
