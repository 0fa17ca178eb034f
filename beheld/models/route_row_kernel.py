"""A Triton kernel that chooses a single row's experts: scores, groups, the best ones and their weights in one launch.

A program of one warp holds all logits. It finds the best one as often as there are choices; numbers are compared as
integers of the same order, for which the hardware has an instruction over a warp. It starts before the product of the
router ends, see one_row_kernel.py:

    choose    signal  read correction  wait  compute

Shapes: E experts, C choices, G groups of S experts each, L lanes for all of them.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from beheld.models.one_row_kernel import _options
from beheld.platform.early_launch import gdc_launch_dependents, gdc_wait

# Less than the order of every number, and more than that of each but NaN, which torch.topk takes for the largest.
_LEAST = tl.constexpr(-(2**31))
_MOST = tl.constexpr(2**31 - 1)


@triton.jit
def _order(x):
    """Return integers in the order of float32 numbers."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), _MOST)


@triton.jit
def _choose(
    logits_ptr,
    correction_ptr,
    choice_ptr,
    share_ptr,
    groups,
    group_size,
    kept,
    choices,
    normed,
    scale,
    G: tl.constexpr,
    S: tl.constexpr,
    SIGMOID: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program chooses. G, S: lanes for groups and for a group's experts; G is 1 if groups do not matter."""
    if EARLY:
        gdc_launch_dependents()
    l_L = tl.arange(0, G * S)
    expert_L = (l_L // S) * group_size + l_L % S
    inside_L = (l_L % S < group_size) & (l_L // S < groups)
    if correction_ptr is not None:
        correction_L = tl.load(correction_ptr + expert_L, mask=inside_L, other=0.0).to(tl.float32)
    if EARLY:
        gdc_wait()
    x_L = tl.load(logits_ptr + expert_L, mask=inside_L, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        score_L = 1.0 / (1.0 + tl.exp(-x_L))
    else:
        score_L = tl.exp(x_L - tl.max(x_L, 0))
        score_L = score_L / tl.sum(score_L, 0)
    # Scores have the order of logits, but may be equal where those are not.
    key_L = _order(x_L)
    if (correction_ptr is not None) or G > 1:
        corrected_L = score_L
        if correction_ptr is not None:
            corrected_L += correction_L
        key_L = _order(corrected_L)
        if G > 1:
            corrected_GS = tl.reshape(tl.where(inside_L, corrected_L, float("-inf")), [G, S])
            best_G = tl.max(corrected_GS, 1)
            s_GS = tl.arange(0, S)[None, :] + tl.zeros([G, S], tl.int32)
            first_G = tl.min(tl.where(corrected_GS == best_G[:, None], s_GS, S), 1)
            next_G = tl.max(tl.where(s_GS == first_G[:, None], float("-inf"), corrected_GS), 1)
            g_G = tl.arange(0, G)
            group_G = tl.where(g_G < groups, _order(best_G + next_G), _LEAST)
            kept_G = tl.zeros([G], tl.int32)
            for _ in range(kept):
                best = tl.max(group_G, 0)
                found = tl.min(tl.where(group_G == best, g_G, G), 0)
                kept_G = tl.where(g_G == found, 1, kept_G)
                group_G = tl.where(g_G == found, _LEAST, group_G)
            kept_L = tl.reshape(kept_G[:, None] + tl.zeros([G, S], tl.int32), [G * S])
            # The order of minus infinity: such experts are chosen if there are not enough others.
            key_L = tl.where(kept_L == 1, key_L, _LEAST + 0x7FFFFF)
    key_L = tl.where(inside_L, key_L, _LEAST)
    place_L = tl.zeros([G * S], tl.int32) + choices
    for place in range(choices):
        best = tl.max(key_L, 0)
        found = tl.min(tl.where(key_L == best, l_L, G * S), 0)
        place_L = tl.where(l_L == found, place, place_L)
        key_L = tl.where(l_L == found, _LEAST, key_L)
    chosen_L = place_L < choices
    total = tl.sum(tl.where(chosen_L, score_L, 0.0), 0)
    share_L = score_L / tl.where(normed != 0, total + 1e-20, 1.0) * scale
    tl.store(share_ptr + place_L, share_L.to(share_ptr.dtype.element_ty), mask=chosen_L)
    tl.store(choice_ptr + place_L, expert_L.to(tl.int64), mask=chosen_L)


def choose(
    logits_E: Tensor,
    correction_E: Tensor | None,
    *,
    sigmoid: bool,
    choices: int,
    groups: int,
    kept: int,
    normed: bool,
    scale: float,
    dtype: torch.dtype,
    early: bool,
) -> tuple[Tensor, Tensor]:
    """Return the shares (C,) and the numbers (C,) of a row's experts, the best first; of equal ones the first.

    Args:
        correction_E: added to scores for the choice alone.
        sigmoid: scores are sigmoids of logits; otherwise their softmax.
        groups, kept: experts form so many groups of equal size, of which this many count, those with the largest sums
            of two scores; 1 and 1: no groups.
        normed: shares are divided by their sum.
        scale: multiplies shares.
        dtype: of the shares.
        early: start before the previous kernel ends; only if the hardware can.
    """
    assert all(each is None or each.is_contiguous() for each in (logits_E, correction_E))
    experts = logits_E.numel()
    assert experts % groups == 0
    assert choices <= experts
    share_C = logits_E.new_empty(choices, dtype=dtype)
    choice_C = logits_E.new_empty(choices, dtype=torch.int64)
    sizes = groups, experts // groups, kept, choices, int(normed), scale
    lanes = triton.next_power_of_2(groups), max(2, triton.next_power_of_2(experts // groups))
    given = logits_E, correction_E, choice_C, share_C, *sizes, *lanes
    _choose[(1,)](*given, sigmoid, early, num_warps=1, enable_fp_fusion=True, **_options(early))
    return share_C, choice_C
