"""Random sampling in one Triton launch: temperature, min-p, top-k, top-p and the choice, without sorting.

torch sorts a vocabulary to find the end of a nucleus: 8 milliseconds for 256 rows of 151,936 logits on an H200, longer
than the model's step. But only one number is needed, the least logit that is kept. Each pass over the row narrows the
bounds of the search for it.

Shapes: R rows sampled at random in a batch of B, V vocabulary, N logits that a program reads at once, P pivots, S
slices of a row, C programs of a row.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from beheld.platform.registry import platform_of
from beheld.sample.filters import Filters

# This far below the best logit, exp is 0 in float32: such tokens are never sampled, with any filter.
_NOTHING = tl.constexpr(104.0)
_PIVOTS = tl.constexpr(4)
_ELEMENTS = 2048
# A row is summed in slices of _TURNS * _ELEMENTS logits, whichever program reads them. So its sums do not depend on the
# number of its programs, and thereby not on other rows.
_TURNS = 3
# The most programs per row.
_MOST_EACH = tl.constexpr(32)
# These differ between batches and must not cause a recompilation, which takes a second.
_ALIKE = ("programs", "filtered")
_ANYWHERE = tuple(
    f"{name}_ptr"
    for name in [
        "ids",
        "broken",
        "places",
        "temperature",
        "keys",
        "top_k",
        "top_p",
        "log_min_p",
        "sums",
        "ends",
        "tokens",
        "counter",
        "floors",
    ]
)


@triton.jit
def _read(logits_ptr, cell_N, vocab_size, temperature):
    """Logits after temperature; minus infinity beyond the vocabulary."""
    logit_N = tl.load(logits_ptr + cell_N, mask=cell_N < vocab_size, other=float("-inf")).to(tl.float32)
    return tl.div_rn(logit_N, tl.zeros_like(logit_N) + temperature)


@triton.jit
def _meet(counter_ptr, met, programs):
    """Wait until all programs of the row arrive here for the `met`-th time; their earlier writes are then visible."""
    tl.debug_barrier()
    if programs > 1:
        tl.atomic_add(counter_ptr, 1, sem="release", scope="gpu")
        while tl.atomic_add(counter_ptr, 0, sem="acquire", scope="gpu") < met * programs:
            pass
        tl.debug_barrier()


@triton.jit
def _measured(
    logits_ptr,
    vocab_size,
    temperature,
    best,
    floor,
    pivot_P,
    weighed,
    sums_ptr,
    ends_ptr,
    counter_ptr,
    met,
    programs,
    SLICES: tl.constexpr,
    TURNS: tl.constexpr,
    N: tl.constexpr,
):
    """For each pivot: the amount at or above it, the least logit at or above it, and the greatest below it.

    The amount is the number of logits, or the total weight exp(logit - best) of those that also reach `floor`.
    """
    program, index_P = tl.program_id(1), tl.arange(0, _PIVOTS)
    above_PN = tl.full([_PIVOTS, N], float("inf"), tl.float32)
    below_PN = tl.full([_PIVOTS, N], float("-inf"), tl.float32)
    # Two alternating buffers: a slow program may still read the previous results.
    sums_ptr += met % 2 * SLICES * _PIVOTS
    ends_ptr += met % 2 * programs * 2 * _PIVOTS
    num_slices = tl.cdiv(vocab_size, TURNS * N)
    for part in range(program, num_slices, programs):
        measure_PN = tl.zeros([_PIVOTS, N], tl.float32)
        for turn in range(TURNS):
            logit_N = _read(logits_ptr, (part * TURNS + turn) * N + tl.arange(0, N), vocab_size, temperature)
            one_N = tl.where(logit_N >= floor, 1.0, 0.0)
            if weighed == 1:
                one_N *= libdevice.exp(logit_N - best)
            reaches_PN = logit_N[None, :] >= pivot_P[:, None]
            measure_PN += tl.where(reaches_PN, one_N[None, :], 0.0)
            above_PN = tl.minimum(above_PN, tl.where(reaches_PN, logit_N[None, :], float("inf")))
            below_PN = tl.maximum(below_PN, tl.where(reaches_PN, float("-inf"), logit_N[None, :]))
        tl.store(sums_ptr + part * _PIVOTS + index_P, tl.sum(measure_PN, 1))
    above_P, below_P = tl.min(above_PN, 1), tl.max(below_PN, 1)
    if programs > 1:
        tl.store(ends_ptr + program * 2 * _PIVOTS + index_P, above_P)
        tl.store(ends_ptr + (program * 2 + 1) * _PIVOTS + index_P, below_P)
    _meet(counter_ptr, met, programs)
    part_S = tl.arange(0, SLICES)
    sums_ptrs = sums_ptr + part_S[:, None] * _PIVOTS + index_P[None, :]
    measure_SP = tl.load(sums_ptrs, mask=(part_S < num_slices)[:, None], other=0.0)
    if programs > 1:
        program_C = tl.arange(0, _MOST_EACH)[:, None]
        ends_ptrs = ends_ptr + program_C * 2 * _PIVOTS + index_P[None, :]
        above_P = tl.min(tl.load(ends_ptrs, mask=program_C < programs, other=float("inf")), 0)
        below_P = tl.max(tl.load(ends_ptrs + _PIVOTS, mask=program_C < programs, other=float("-inf")), 0)
    return tl.sum(measure_SP.to(tl.float64), 0), above_P, below_P


@triton.jit
def _floor(
    logits_ptr,
    vocab_size,
    temperature,
    best,
    floor,
    top_k,
    top_p,
    sums_ptr,
    ends_ptr,
    counter_ptr,
    met,
    programs,
    SLICES: tl.constexpr,
    TURNS: tl.constexpr,
    N: tl.constexpr,
):
    """The least logit that top-k and then top-p keep of those that reach `floor`, and how often the programs have met.

    For each filter it is the greatest logit such that `top_k` logits, or `top_p` of the weight still kept, are at or
    above it. Logits too low to make a difference are kept.
    """
    index_P = tl.arange(0, _PIVOTS)
    for weighed in range(2):
        wanted = top_k.to(tl.float64)
        searching, counted = top_k > 0, best - float("inf")
        if weighed == 1:
            searching, counted = top_p < 1.0, floor
        low, high, first = best - float("inf"), best, 1
        while searching:
            # In most models the logits that matter lie within a few units of the best; lower ones take more passes.
            depth_P = tl.where(index_P == 0, _NOTHING, tl.where(index_P == 1, 12.0, (3 - index_P) * 2.5 + 0.5))
            pivot_P = tl.maximum(best - depth_P, counted)
            if first == 0:
                pivot_P = low + (high - low) * ((index_P + 1).to(tl.float32) / _PIVOTS)
                pivot_P = tl.where((pivot_P > low) & (pivot_P < high) & (index_P < _PIVOTS - 1), pivot_P, high)
            measure_P, above_P, below_P = _measured(
                logits_ptr,
                vocab_size,
                temperature,
                best,
                counted,
                pivot_P,
                weighed,
                sums_ptr,
                ends_ptr,
                counter_ptr,
                met,
                programs,
                SLICES,
                TURNS,
                N,
            )
            met += 1
            if (weighed == 1) & (first == 1):
                wanted = top_p * tl.max(measure_P, 0)
            enough_P = measure_P >= wanted
            # Both bounds are logits of the row, and each pass moves them closer by at least one logit.
            low = tl.maximum(low, tl.max(tl.where(enough_P, above_P, float("-inf")), 0))
            high = tl.minimum(high, tl.min(tl.where(enough_P, float("inf"), below_P), 0))
            searching = (low < high) & (low > float("-inf"))
            first = 0
        floor = tl.maximum(floor, low)
    return floor, met


@triton.jit(do_not_specialize=_ALIKE, do_not_specialize_on_alignment=_ANYWHERE)
def _sample(
    logits_ptr,
    ids_ptr,
    broken_ptr,
    places_ptr,
    temperature_ptr,
    keys_ptr,
    top_k_ptr,
    top_p_ptr,
    log_min_p_ptr,
    sums_ptr,
    ends_ptr,
    tokens_ptr,
    counter_ptr,
    floors_ptr,
    vocab_size,
    logits_row,
    programs,
    filtered,
    SLICES: tl.constexpr,
    TURNS: tl.constexpr,
    N: tl.constexpr,
):
    """One program: a row, or the part of it that consists of every C-th slice."""
    index, program = tl.program_id(0), tl.program_id(1)
    place = tl.load(places_ptr + index)
    logits_ptr += place * logits_row
    sums_ptr += index * 2 * SLICES * _PIVOTS
    ends_ptr += index * 2 * programs * 2 * _PIVOTS
    counter_ptr += index
    temperature = tl.load(temperature_ptr + index)
    program_C = tl.arange(0, _MOST_EACH)
    best_N = tl.full([N], float("-inf"), tl.float32)
    for part in range(program, tl.cdiv(vocab_size, N), programs):
        logit_N = _read(logits_ptr, part * N + tl.arange(0, N), vocab_size, temperature)
        # tl.max does not propagate a NaN; infinity is equally broken.
        best_N = tl.maximum(best_N, tl.where(logit_N != logit_N, float("inf"), logit_N))
    best = tl.max(best_N, 0)
    met = 1
    if programs > 1:
        bests_ptr = ends_ptr + programs * 2 * _PIVOTS
        tl.store(bests_ptr + program, best)
        _meet(counter_ptr, met, programs)
        best = tl.max(tl.load(bests_ptr + program_C, mask=program_C < programs, other=float("-inf")), 0)
    met = 2
    if (best == float("inf")) | (best == float("-inf")):
        if program == 0:
            tl.store(ids_ptr + place, tl.full([], 0, tl.int64))
            tl.store(broken_ptr + place, tl.full([], 1, tl.int1))
            tl.store(floors_ptr + index, tl.full([], float("-inf"), tl.float32))
    else:
        floor = best - _NOTHING
        if filtered != 0:
            top_k, top_p = tl.load(top_k_ptr + index), tl.load(top_p_ptr + index)
            floor = tl.maximum(floor, (best.to(tl.float64) + tl.load(log_min_p_ptr + index)).to(tl.float32))
            floor, met = _floor(
                logits_ptr,
                vocab_size,
                temperature,
                best,
                floor,
                top_k,
                top_p,
                sums_ptr,
                ends_ptr,
                counter_ptr,
                met,
                programs,
                SLICES,
                TURNS,
                N,
            )
        score, token = _best_score(logits_ptr, keys_ptr + 2 * index, vocab_size, temperature, best, floor, programs, N)
        if programs > 1:
            ends_ptr += met % 2 * programs * 2 * _PIVOTS
            tokens_ptr += index * programs
            tl.store(ends_ptr + program, score)
            tl.store(tokens_ptr + program, token)
            _meet(counter_ptr, met, programs)
            score_C = tl.load(ends_ptr + program_C, mask=program_C < programs, other=-2.0)
            token = _first_best(score_C, tl.load(tokens_ptr + program_C, mask=program_C < programs, other=0))
        if program == 0:
            tl.store(ids_ptr + place, token.to(tl.int64))
            tl.store(broken_ptr + place, tl.full([], 0, tl.int1))
            tl.store(floors_ptr + index, tl.where(floor > best - _NOTHING, floor, float("-inf")))


@triton.jit
def _first_best(score_N, token_N):
    return tl.min(tl.where(score_N == tl.max(score_N, 0), token_N, 0x7FFFFFFF), 0)


@triton.jit
def _hashed(x, shift, factor):
    return (x ^ (x >> shift)) * factor


@triton.jit
def _best_score(
    logits_ptr,
    keys_ptr,
    vocab_size,
    temperature,
    best,
    floor,
    programs,
    N: tl.constexpr,
):
    """The greatest weight / noise among the logits that reach `floor`, and the first token that has it.

    The noise is that of `noise.Noise`.
    """
    first_key = tl.load(keys_ptr).to(tl.uint32, bitcast=True)
    second_key = tl.load(keys_ptr + 1).to(tl.uint32, bitcast=True)
    score_N = tl.full([N], -1.0, tl.float32)
    token_N = tl.zeros([N], tl.int32)
    for part in range(tl.program_id(1), tl.cdiv(vocab_size, N), programs):
        cell_N = part * N + tl.arange(0, N)
        logit_N = _read(logits_ptr, cell_N, vocab_size, temperature)
        x_N = _hashed(_hashed((cell_N + 1).to(tl.uint32), 16, 0x7FEB352D), 15, 0x846CA68B)
        x_N = x_N ^ (x_N >> 16) ^ first_key
        x_N = _hashed(_hashed(x_N, 16, 0x7FEB352D) ^ second_key, 15, 0x846CA68B)
        x_N = (x_N ^ (x_N >> 16)) & 0x7FFFFFFF
        uniform_N = (x_N.to(tl.int32).to(tl.float32) + 0.5) * 4.656612873077393e-10
        noise_N = -libdevice.log1p(-tl.minimum(uniform_N, 0.9999999403953552))
        ratio_N = tl.div_rn(libdevice.exp(logit_N - best), noise_N)
        better_N = (ratio_N > score_N) & (logit_N >= floor)
        score_N = tl.where(better_N, ratio_N, score_N)
        token_N = tl.where(better_N, cell_N, token_N)
    return tl.max(score_N, 0), _first_best(score_N, token_N)


def _programs(rows: int, slices: int, device: torch.device) -> int:
    """Number of programs per row. Programs wait for one another, so those of all rows must run at once."""
    most = platform_of(device).kernel_facts(device).side_by_side
    programs = 1
    while 2 * programs * rows <= most and programs < min(_MOST_EACH.value, slices):
        programs *= 2
    return programs


def sample_(
    ids_B: Tensor,
    broken_B: Tensor,
    logits_BV: Tensor,
    places_R: Tensor,
    temperature_R1: Tensor,
    keys_R2: Tensor,
    filters: Filters | None,
) -> Tensor:
    """Write the tokens of rows `places_R` into `ids_B` (0 for a broken row), and into `broken_B` which rows are broken.

    Returns the floors (R), float32, of logits after temperature: minus infinity where no filter leaves out a token.

    A row is broken if it holds a NaN or has no finite greatest logit. The kept candidates are those of
    `filters.floors`, up to the rounding of sums of weights: here the sums are float32, in an order that does not depend
    on other rows.
    """
    assert logits_BV.stride(1) == 1
    assert keys_R2.is_contiguous()
    rows, vocab_size, device = len(places_R), logits_BV.shape[1], logits_BV.device
    slices = triton.next_power_of_2(triton.cdiv(vocab_size, _TURNS * _ELEMENTS))
    programs = _programs(rows, slices, device)
    pivots = _PIVOTS.value
    sizes = [*(rows * n * pivots for n in (2 * slices, 4 * programs, programs)), rows]
    work = torch.empty(sum(sizes), dtype=torch.float32, device=device)
    sums, ends, tokens, floors = work.split(sizes)
    counter = tokens
    if programs > 1:
        counter = torch.zeros(rows, dtype=torch.int32, device=device)
    if filters is None:
        # Never read; they only have the right types.
        columns = ids_B, temperature_R1.double(), temperature_R1.double()
    else:
        columns = filters.top_k_R1, filters.top_p_R1, filters.log_min_p_R1
    _sample[(rows, programs)](
        logits_BV,
        ids_B,
        broken_B,
        places_R,
        temperature_R1,
        keys_R2,
        *columns,
        sums,
        ends,
        tokens.view(torch.int32),
        counter,
        floors,
        vocab_size,
        logits_BV.stride(0),
        programs,
        int(filters is not None),
        slices,
        _TURNS,
        _ELEMENTS,
        num_warps=16,
        # Round products before adding them, as elsewhere.
        enable_fp_fusion=False,
        launch_cooperative_grid=programs > 1,
    )
    return floors
