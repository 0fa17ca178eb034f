"""Filters on candidates: bans, allowed ids, bias, grammar masks, and the floors of top-k, top-p and min-p.

Shapes: B rows of a batch, R of them sampled at random, P pairs (place in the batch, token id), V vocabulary, W bytes of
a bit mask, K greatest logits.

The three probability filters keep the logits at or above a floor. A floor does not depend on how a sort orders equal
logits, so a row's candidates are the same in every batch; logits equal to the last one kept are kept too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from beheld.core.sampling import Sampling

# A nucleus is searched among this many greatest logits before everything is sorted.
_HEAD = 1024


@dataclass(frozen=True, eq=False)
class Edits:
    """Changes to single logits that stay the same as long as a batch has the same rows."""

    banned: tuple[Tensor, Tensor] | None
    allowed: tuple[Tensor, Tensor, Tensor] | None
    biased: tuple[Tensor, Tensor, Tensor] | None

    def apply_(self, logits_BV: Tensor) -> None:
        """Change `logits_BV` in place: first allowed ids, then bans, then bias."""
        if self.allowed is not None:
            rows, places_P, ids_P = self.allowed
            kept_P = logits_BV[places_P, ids_P]
            logits_BV.index_fill_(0, rows, -math.inf)
            logits_BV[places_P, ids_P] = kept_P
        if self.banned is not None:
            # `logits_BV[...] = -math.inf` would copy the number from the host and wait for the device.
            logits_BV.index_put_(self.banned, logits_BV.new_full((), -math.inf))
        if self.biased is not None:
            places_P, ids_P, bias_P = self.biased
            logits_BV.index_put_((places_P, ids_P), bias_P, accumulate=True)


def edits(
    params: Sequence[Sampling], phases: Sequence[tuple[bool, bool]], vocab_size: int, device: torch.device
) -> Edits | None:
    """The edits of a batch, row by row; None if there are none.

    Args:
        phases: of each row, whether its answer is below min_tokens, and whether it has no token yet.
    """
    banned: list[tuple[int, int]] = []
    # As arrays: a request may allow nearly the whole vocabulary, and edits are made anew whenever a row comes or goes.
    allowing: list[int] = []
    allowed: list[NDArray[np.int64]] = []
    biased: list[tuple[int, int]] = []
    values: list[float] = []
    for place, (row, (below, begins)) in enumerate(zip(params, phases, strict=True)):
        banned.extend((place, word[0]) for word in row.bad_words_ids if len(word) == 1 and word[0] < vocab_size)
        if below:
            banned.extend((place, token) for token in row.stop_ids if token < vocab_size)
        if begins:
            banned.extend((place, token) for token in row.first_forbidden)
        if row.allowed_token_ids is not None:
            allowing.append(place)
            allowed.append(np.fromiter(row.allowed_token_ids, np.int64, len(row.allowed_token_ids)))
        for token, bias in row.logit_bias:
            biased.append((place, token))
            values.append(bias)
    if not (banned or allowed or biased):
        return None
    return Edits(
        _pairs(banned, device) if banned else None,
        _allowed(allowing, allowed, device) if allowed else None,
        (*_pairs(biased, device), torch.tensor(values).to(device, non_blocking=True)) if biased else None,
    )


def _upload(numbers: Iterable[int], device: torch.device) -> Tensor:
    return torch.tensor(list(numbers), dtype=torch.int64).to(device, non_blocking=True)


def _allowed(
    rows: Sequence[int], ids: Sequence[NDArray[np.int64]], device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    places_P = np.repeat(np.array(rows, dtype=np.int64), [len(each) for each in ids])
    moved = [torch.from_numpy(each).to(device, non_blocking=True) for each in (places_P, np.concatenate(ids))]
    return _upload(rows, device), moved[0], moved[1]


def _pairs(pairs: Sequence[tuple[int, int]], device: torch.device) -> tuple[Tensor, Tensor]:
    places_P, ids_P = torch.tensor(pairs, dtype=torch.int64).T.contiguous().to(device, non_blocking=True)
    return places_P, ids_P


@dataclass(frozen=True, eq=False)
class Masks:
    """The tokens that the grammars of M rows of a batch allow.

    Attributes:
        places_M: int64, the rows' places in the batch.
        bytes_MW: uint8 bit masks: token t has bit t % 8 of byte t // 8, which is 1 if the token is allowed.
    """

    places_M: Tensor
    bytes_MW: Tensor

    def apply_(self, logits_BV: Tensor) -> None:
        """Remove in place the tokens of these rows whose bit is 0; other rows stay as they are."""
        vocab_size = logits_BV.shape[-1]
        assert self.bytes_MW.dtype == torch.uint8
        assert self.bytes_MW.shape[-1] * 8 >= vocab_size
        bits_8 = torch.arange(8, dtype=torch.uint8, device=self.bytes_MW.device)
        allowed_MV = ((self.bytes_MW.unsqueeze(-1) >> bits_8) & 1).flatten(-2)[:, :vocab_size]
        masked_MV = logits_BV.index_select(0, self.places_M).masked_fill_(allowed_MV == 0, -math.inf)
        logits_BV.index_copy_(0, self.places_M, masked_MV)


def floor_of_row(logits_V: NDArray[np.float32], params: Sampling) -> float:
    """The floor of one row on a CPU, after temperature; minus infinity keeps everything. The greatest logit is finite.

    Min-p keeps tokens at least min_p times as likely as the best, top-k the k best, and top-p the fewest best tokens
    whose probabilities, after the other two filters, sum to at least top_p.
    """
    size = len(logits_V)
    top = float(logits_V.max())
    floor = -math.inf
    if params.min_p > 0.0:
        floor = float(np.float32(top + math.log(params.min_p)))
    if 0 < params.top_k < size:
        floor = max(floor, float(np.partition(logits_V, size - params.top_k)[size - params.top_k]))
    if params.top_p < 1.0:
        kept_N = logits_V if floor == -math.inf else logits_V[logits_V >= np.float32(floor)]
        floor = max(floor, _nucleus_floor(kept_N, top, params.top_p))
    return floor


def _nucleus_floor(logits_N: NDArray[np.float32], top: float, top_p: float) -> float:
    """The least of the fewest greatest logits whose weights exp(logit - top) reach `top_p` of the sum."""
    size = len(logits_N)
    wanted = top_p * float(np.exp(logits_N - np.float32(top)).sum(dtype=np.float64))
    head = size if size <= 2 * _HEAD else _HEAD
    while True:
        head_K = np.partition(logits_N, size - head)[size - head :] if head < size else logits_N.copy()
        head_K.sort()
        head_K = head_K[::-1]
        reached_K = np.cumsum(np.exp(head_K.astype(np.float64) - top))
        if head == size or reached_K[-1] >= wanted:
            break
        head = size
    # The first index at which the sum is reached is the last one kept.
    last = min(int(np.searchsorted(reached_K, wanted)), head - 1)
    return float(head_K[last])


@dataclass(frozen=True, eq=False)
class Filters:
    """The probability filters of the rows sampled at random, as columns; the `num_top` greatest logits decide them."""

    top_k_R1: Tensor
    top_p_R1: Tensor
    log_min_p_R1: Tensor
    num_top: int


def filters(params: Sequence[Sampling], vocab_size: int, device: torch.device) -> Filters | None:
    """The filters of a batch; None if no row has one."""
    top_k = [p.top_k if 0 < p.top_k < vocab_size else 0 for p in params]
    if not any(k or p.top_p < 1.0 or p.min_p > 0.0 for k, p in zip(top_k, params, strict=True)):
        return None
    open_nucleus = any(not k and p.top_p < 1.0 for k, p in zip(top_k, params, strict=True))
    log_min_p = [math.log(p.min_p) if p.min_p > 0.0 else -math.inf for p in params]
    top_p_R, log_min_p_R = torch.tensor([[p.top_p for p in params], log_min_p], dtype=torch.float64).to(
        device, non_blocking=True
    )
    return Filters(
        _upload(top_k, device).unsqueeze(-1),
        top_p_R.unsqueeze(-1),
        log_min_p_R.unsqueeze(-1),
        vocab_size if open_nucleus else max(1, *top_k),
    )


def floors(logits_RV: Tensor, chosen: Filters) -> Tensor:
    """The floors (R, 1) of rows on any device, after temperature, without waiting for it; see `floor_of_row`."""
    if chosen.num_top > _HEAD:
        top_RK = logits_RV.sort(-1, descending=True).values
    else:
        top_RK = logits_RV.topk(chosen.num_top, dim=-1).values
    best_R1 = top_RK[:, :1]
    kth_R1 = top_RK.gather(-1, (chosen.top_k_R1 - 1).clamp(0, top_RK.shape[-1] - 1))
    least_R1 = (best_R1 + chosen.log_min_p_R1).float()
    floor_R1 = torch.maximum(least_R1, kth_R1.masked_fill(chosen.top_k_R1 == 0, -math.inf))
    weights_RK = (top_RK.double() - best_R1).exp().masked_fill(top_RK < floor_R1, 0.0)
    reached_RK = weights_RK.cumsum(-1)
    # All logits equal to the k-th are kept. How many of them are among the greatest depends on the other rows' k.
    left_out_R1 = (logits_RV == kth_R1).sum(-1, keepdim=True) - (top_RK == kth_R1).sum(-1, keepdim=True)
    outside_R1 = left_out_R1 * (kth_R1.double() - best_R1).exp().masked_fill(kth_R1 < floor_R1, 0.0)
    total_R1 = reached_RK[:, -1:] + outside_R1.masked_fill(chosen.top_k_R1 == 0, 0.0)
    # A logit is kept if the sum before it has not reached top_p.
    count_R1 = (reached_RK - weights_RK < chosen.top_p_R1 * total_R1).sum(-1, keepdim=True)
    nucleus_R1 = top_RK.gather(-1, (count_R1 - 1).clamp(min=0)).masked_fill(chosen.top_p_R1 >= 1.0, -math.inf)
    return torch.maximum(floor_R1, nucleus_R1)
