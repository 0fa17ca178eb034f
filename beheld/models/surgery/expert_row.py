"""Experts on an NVIDIA GPU: those of a single row by kernels of ours, those of many by a library's grouped product.

Of a single row, reading the chosen experts' weights takes all the time. A grouped product takes five times as long (an
H200; 64 experts, 4 of them chosen, 2048 x 1536), and it needs rows that are sorted by expert before and put back after.
Here two launches read the choices where the router left them.

Of many rows, what stands around the products took half of their time again (an H200, 8,192 rows of Qwen3-VL-30B-A3B):
see quant/slot_order_kernel.py for what does it here.

Shapes: C choices, E experts, I inner size, H hidden size.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from beheld.core.errors import first_line
from beheld.models.one_row import early_start
from beheld.models.surgery.experts import can_group, grouped
from beheld.models.surgery.operation import Changes
from beheld.models.surgery.rank_trial import RankTrial
from beheld.platform import operators
from beheld.quant.linear import OneRowExperts
from beheld.utils.log import get_logger

logger = get_logger(__name__)

# Relative to the size of the result, in 16 bits: both round what lies between the products.
_CLOSE = 1e-2
# Of a trial for many rows: more slots than one program of a kernel looks at together.
_TRIED_ROWS = 520


def fits(experts: Any) -> bool:
    """Return whether they are transformers' gated experts, whose weights have an output's inputs side by side."""
    if not getattr(experts, "has_gate", False) or getattr(experts, "is_transposed", True):
        return False
    if getattr(experts, "has_post_expert_norm", False) or not callable(getattr(experts, "_apply_gate", None)):
        return False
    # A method that another operation has put there is not computed by the kernels.
    if "forward" in vars(experts):
        return False
    weights = [getattr(experts, name, None) for name in ("gate_up_proj", "down_proj")]
    return all(isinstance(w, Tensor) and w.dim() == 3 and w.is_contiguous() and w.element_size() == 2 for w in weights)


def _groups(experts: Any) -> bool:
    """Return whether many rows of `fits` experts are computed here, too."""
    return not experts.has_bias and can_group(experts.gate_up_proj, experts.down_proj)


def _row_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute a single row by kernels and others as before: in place of a method of `fits` experts."""
    if _has_many(hidden_states):
        out: Tensor = type(self).forward(self, hidden_states, top_k_index, top_k_weights)
        return out
    return _row(self, hidden_states, top_k_index, top_k_weights)


def _forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute all rows of experts that are grouped here: in place of a method of `fits` experts."""
    if not _has_many(hidden_states):
        return _row(self, hidden_states, top_k_index, top_k_weights)
    both = self.gate_up_proj.transpose(1, 2), self.down_proj.transpose(1, 2)
    return grouped(hidden_states, *both, self._apply_gate, top_k_index, top_k_weights)


def _has_many(x_TH: Tensor) -> bool:
    # Under torch.compile one row and several rows compile separately anyway.
    return x_TH.dim() != 2 or x_TH.shape[0] != 1


def _row(experts: Any, x_1H: Tensor, choices_1C: Tensor, shares_1C: Tensor) -> Tensor:
    inner_bias, outer_bias = (experts.gate_up_proj_bias, experts.down_proj_bias) if experts.has_bias else (None, None)
    inner_CI = torch.ops.beheld.expert_row_inner(x_1H, experts.gate_up_proj, inner_bias, choices_1C)
    gated_CI = experts._apply_gate(inner_CI)
    out: Tensor = torch.ops.beheld.expert_row_outer(gated_CI, experts.down_proj, outer_bias, choices_1C, shares_1C)
    return out.to(x_1H.dtype)


def use_expert_rows(model: nn.Module, changes: Changes, trial: RankTrial) -> int:
    """Compute experts by kernels where that gives what they gave before; returns how many do."""
    found = 0
    for experts in model.modules():
        own: Any = experts
        value: Any
        if isinstance(experts, OneRowExperts):
            name, value = "one_row", True
            made = _Row(experts.num_experts, experts.inputs, experts.dtype)
        elif fits(experts):
            name, value = "forward", MethodType(_forward if _groups(own) else _row_forward, own)
            made = _Row(len(own.down_proj), own.gate_up_proj.shape[2], own.down_proj.dtype)
        else:
            continue
        # Ranks that compute the same row must get the same bits.
        if trial.agreed(_same(own, made, name, value)):
            changes.set(own, name, value)
            found += 1
    return found


class _Row(NamedTuple):
    """What the rows of a trial are made for: this many experts, inputs of an expert, and their type."""

    experts: int
    inputs: int
    dtype: torch.dtype


@torch.inference_mode()
def _answer(experts: Any, row: _Row, count: int) -> Tensor:
    """Apply experts to rows, always the same."""
    device = next(experts.parameters()).device
    made = torch.Generator().manual_seed(0)
    choices_TC = torch.stack([torch.randperm(row.experts, generator=made)[:4] for _ in range(count)])
    shares_TC = torch.rand(choices_TC.shape, generator=made)
    x_TH = torch.randn(count, row.inputs, generator=made)
    out: Tensor = experts(x_TH.to(device, row.dtype), choices_TC.to(device), shares_TC.to(device))
    return out.double()


def _same(experts: Any, row: _Row, name: str, value: Any) -> bool:
    """Return whether experts give with this attribute what they give without."""
    tried, counts = Changes(), (1, *((_TRIED_ROWS,) if name == "forward" and _groups(experts) else ()))
    try:
        want = [_answer(experts, row, count) for count in counts]
        tried.set(experts, name, value)
        got = [_answer(experts, row, count) for count in counts]
    except Exception as error:
        logger.warning("Experts are computed as transformers computes them: %s", first_line(error))
        return False
    finally:
        tried.take_back()
    pairs = list(zip(got, want, strict=True))
    close = all(y.shape == x.shape and bool((y - x).norm() <= _CLOSE * x.norm()) for y, x in pairs)
    if not close:
        logger.warning("Experts are computed as transformers computes them: the kernels' result differs.")
    return close


def _inner(x_1H: Tensor, weight_ENH: Tensor, bias_EN: Tensor | None, choices_1C: Tensor) -> Tensor:
    from beheld.models.expert_row_kernel import inner

    x_H, choice_C = x_1H.reshape(-1).contiguous(), choices_1C.reshape(-1).contiguous()
    return inner(x_H, weight_ENH, bias_EN, choice_C, early=early_start(x_1H.device))


def _inner_shape(x_1H: Tensor, weight_ENH: Tensor, bias_EN: Tensor | None, choices_1C: Tensor) -> Tensor:
    return x_1H.new_empty((choices_1C.shape[1], weight_ENH.shape[1]))


def _outer(x_CI: Tensor, weight_EHI: Tensor, bias_EH: Tensor | None, choices_1C: Tensor, shares_1C: Tensor) -> Tensor:
    from beheld.models.expert_row_kernel import outer

    choice_C, share_C = choices_1C.reshape(-1).contiguous(), shares_1C.reshape(-1).contiguous()
    early = early_start(x_CI.device)
    return outer(x_CI.contiguous(), weight_EHI, bias_EH, choice_C, share_C, early=early).unsqueeze(0)


def _outer_shape(
    x_CI: Tensor, weight_EHI: Tensor, bias_EH: Tensor | None, choices_1C: Tensor, shares_1C: Tensor
) -> Tensor:
    return x_CI.new_empty((1, weight_EHI.shape[1]))


operators.register(
    "expert_row_inner(Tensor x, Tensor weight, Tensor? bias, Tensor choices) -> Tensor", _inner, _inner_shape
)
operators.register(
    "expert_row_outer(Tensor x, Tensor weight, Tensor? bias, Tensor choices, Tensor shares) -> Tensor",
    _outer,
    _outer_shape,
)
