"""The choice of a single row's experts on an NVIDIA GPU, in two launches.

A router multiplies the row, makes scores of the products, adds corrections, compares groups, takes the best and weighs
them: a dozen kernels of PyTorch that compute next to nothing (16 microseconds a layer of GLM-4.7-Flash on an H200).
Here one kernel multiplies, and one chooses.

A router is known by its form, not by its class: its parts, and a trial that gives what it gave.

Shapes: R rows, E experts, C choices, H hidden size.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import itertools
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from beheld.core.errors import first_line
from beheld.models.one_row import early_start
from beheld.models.surgery.operation import Changes
from beheld.models.surgery.rank_trial import RankTrial
from beheld.platform import operators
from beheld.utils.log import get_logger

logger = get_logger(__name__)

# Rows of the trial, and how much numbers of float32 and of 16 bits may differ, relative to the largest.
_TRIED = 8
_CLOSE, _CLOSE_16 = 1e-4, 1e-2
# More than any score: corrected by it, all lie below zero.
_LOWERED = 2.0


class Rule(NamedTuple):
    """How a router chooses; see models/route_row_kernel.py.

    Attributes:
        wide_logits, wide_shares: whether they are float32; otherwise they have the row's type.
    """

    sigmoid: bool
    choices: int
    groups: int
    kept: int
    normed: bool
    scale: float
    wide_logits: bool
    wide_shares: bool


def _forward(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Choose a single row's experts by the kernels, others' as before: in place of a router's method."""
    # Under torch.compile one row and several rows compile separately anyway.
    if hidden_states.numel() != hidden_states.shape[-1]:
        many: tuple[Tensor, Tensor, Tensor] = type(self).forward(self, hidden_states)
        return many
    bias_E, correction_E = getattr(self, "bias", None), getattr(self, "e_score_correction_bias", None)
    made: tuple[Tensor, Tensor, Tensor] = torch.ops.beheld.route_row(
        hidden_states, self.weight, bias_E, correction_E, *self.row_rule
    )
    return made


def use_row_routers(model: nn.Module, dtype: torch.dtype, changes: Changes, trial: RankTrial) -> int:
    """Choose single rows' experts by kernels where that gives what routers gave before; returns how many do.

    Args:
        dtype: the rows' type.
    """
    found = 0
    known: Rule | None = None
    for router in model.modules():
        own: Any = router
        if not _fits(own):
            continue
        rule = _rule(own, dtype, known)
        # Ranks that compute the same row must choose the same experts.
        if trial.agreed(rule is not None) and rule is not None:
            known = rule
            changes.set(own, "row_rule", tuple(rule))
            changes.set(own, "forward", MethodType(_forward, own))
            found += 1
    return found


def _fits(router: Any) -> bool:
    """Return whether a module has a router's parts: weights of each expert, and the number of choices."""
    weight, choices = getattr(router, "weight", None), getattr(router, "top_k", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not isinstance(choices, int):
        return False
    # A method that another operation has put there is not computed by the kernels.
    if "forward" in vars(router) or not 0 < choices <= weight.shape[0]:
        return False
    parts = [weight, *(getattr(router, name, None) for name in ("bias", "e_score_correction_bias"))]
    return all(each is None or (each.is_floating_point() and each.is_contiguous()) for each in parts)


@torch.inference_mode()
def _rule(router: Any, dtype: torch.dtype, known: Rule | None) -> Rule | None:
    """Return how a router chooses, by a trial; None if in another way than the kernel's.

    Args:
        known: the rule of another router of the model, tried first.
    """
    experts, hidden = router.weight.shape
    made = torch.Generator().manual_seed(0)
    x_RH = torch.randn(_TRIED, hidden, generator=made).to(router.weight.device, dtype)
    try:
        want = router(x_RH)
        if not isinstance(want, tuple) or [each.shape for each in want] != [
            (_TRIED, experts), (_TRIED, router.top_k), (_TRIED, router.top_k)
        ]:  # fmt: skip
            return None
        wide = [each.dtype == torch.float32 for each in want[:2]]
        if want[2].dtype != torch.int64 or any(
            not own and each.dtype != dtype for own, each in zip(wide, want, strict=False)
        ):
            return None
        rules = [Rule(*each, *wide) for each in _forms(router)]
        for rule in sorted(rules, key=lambda each: each != known):
            if _same(router, x_RH, want, rule) and (rule.groups == 1 or _stays_within_groups(router, x_RH, rule)):
                return rule
    except Exception as error:
        logger.debug("The experts of a single row are chosen as those of many: %s", first_line(error))
    return None


def _forms(router: Any) -> list[tuple[bool, int, int, int, bool, float]]:
    """Return the forms that a router with these parts may have, the likeliest first."""
    sigmoid = getattr(router, "e_score_correction_bias", None) is not None
    normed = bool(getattr(router, "norm_topk_prob", True))
    scale = float(getattr(router, "routed_scaling_factor", None) or 1.0)
    groups, kept = getattr(router, "num_group", None) or 1, getattr(router, "topk_group", None) or 1
    # Two of each group are added up.
    limited = groups > 1 and router.weight.shape[0] % groups == 0 and 2 * groups <= router.weight.shape[0]
    limits = [(groups, kept), (1, 1)] if limited and kept < groups else [(1, 1)]
    ways = itertools.product((sigmoid, not sigmoid), limits, (normed, not normed))
    return [(way, router.top_k, *limit, norm, scale) for way, limit, norm in ways]


def _same(router: Any, x_RH: Tensor, want: tuple[Tensor, ...], rule: Rule) -> bool:
    """Return whether the kernels give a router's results: its products, and of those its choice."""
    logits_RE, shares_RC, choices_RC = want
    bias_E, correction_E = getattr(router, "bias", None), getattr(router, "e_score_correction_bias", None)
    made = [torch.ops.beheld.route_row(x_1H, router.weight, bias_E, correction_E, *rule)[0] for x_1H in x_RH.split(1)]
    if not _near(torch.cat(made), logits_RE):
        return False
    both = [choice_of(logits_E, correction_E, rule, shares_RC.dtype) for logits_E in logits_RE]
    shares, choices = (torch.stack(each) for each in zip(*both, strict=True))
    # Any of several experts of equal products is right.
    return _near(shares.sort(-1)[0], shares_RC.sort(-1)[0]) and torch.equal(
        logits_RE.gather(1, choices).sort(-1)[0], logits_RE.gather(1, choices_RC).sort(-1)[0]
    )


def _stays_within_groups(router: Any, x_RH: Tensor, rule: Rule) -> bool:
    """Return whether a router chooses as the kernels also where corrected scores lie below zero.

    Some routers give experts of other groups the score zero, which then comes first; the kernels never choose these.
    """
    correction_E = getattr(router, "e_score_correction_bias", None)
    if correction_E is None:
        return True
    own = correction_E.clone()
    try:
        correction_E.sub_(own.max() + _LOWERED)
        return _same(router, x_RH, router(x_RH), rule)
    finally:
        correction_E.copy_(own)


def _near(found: Tensor, wanted: Tensor) -> bool:
    if found.dtype != wanted.dtype:
        return False
    close = _CLOSE if wanted.dtype == torch.float32 else _CLOSE_16
    return bool((found - wanted).abs().max() <= close * wanted.abs().max())


def choice_of(logits_E: Tensor, correction_E: Tensor | None, rule: Rule, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the shares, of this type, and the numbers of a row's experts; see models/route_row_kernel.py."""
    from beheld.models.route_row_kernel import choose

    return choose(
        logits_E, correction_E, sigmoid=rule.sigmoid, choices=rule.choices, groups=rule.groups, kept=rule.kept,
        normed=rule.normed, scale=rule.scale, dtype=dtype, early=early_start(logits_E.device),
    )  # fmt: skip


def _route(
    x: Tensor, weight_EH: Tensor, bias_E: Tensor | None, correction_E: Tensor | None, *given: Any
) -> tuple[Tensor, Tensor, Tensor]:
    from beheld.models.one_row_kernel import one_row

    rule = Rule(*given)
    logits_type, shares_type = (torch.float32 if wide else x.dtype for wide in (rule.wide_logits, rule.wide_shares))
    x_H, early = x.reshape(-1).contiguous(), early_start(x.device)
    logits_E = one_row(x_H, weight_EH, bias_E, early=early, dtype=logits_type)
    share_C, choice_C = choice_of(logits_E, correction_E, rule, shares_type)
    return logits_E.unsqueeze(0), share_C.unsqueeze(0), choice_C.unsqueeze(0)


def _route_shape(
    x: Tensor, weight_EH: Tensor, bias_E: Tensor | None, correction_E: Tensor | None, *given: Any
) -> tuple[Tensor, Tensor, Tensor]:
    rule = Rule(*given)
    logits_type, shares_type = (torch.float32 if wide else x.dtype for wide in (rule.wide_logits, rule.wide_shares))
    chosen = 1, rule.choices
    logits_1E = x.new_empty((1, weight_EH.shape[0]), dtype=logits_type)
    return logits_1E, x.new_empty(chosen, dtype=shares_type), x.new_empty(chosen, dtype=torch.int64)


operators.register(
    "route_row(Tensor x, Tensor weight, Tensor? bias, Tensor? correction, bool sigmoid, int choices, int groups,"
    " int kept, bool normed, float scale, bool wide_logits, bool wide_shares) -> (Tensor, Tensor, Tensor)",
    _route,
    _route_shape,
)
