"""Sampling tokens at random on a GPU: the time of our single launch, and of a library's sort.

    python -m benchmarks.sampling [--vocabulary 151936]

Prints one JSON line per filter and kind of logits: microseconds for so many rows, of ours and of the other way, and
whether both chose the same tokens. "flat" logits are a random model's, in bfloat16; "edited" are the same in float32,
as penalties and grammars leave them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from beheld.core.sampling import Sampling
from beheld.sample import filters, noise, random_kernel

ROWS = (1, 7, 64, 128, 256)
FILTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "top-p 0.95": {"top_p": 0.95},
    "top-k 20": {"top_k": 20},
    "top-k 50, top-p 0.95": {"top_k": 50, "top_p": 0.95},
    "min-p 0.05": {"min_p": 0.05},
}
_TEMPERATURE = 0.8


def microseconds(call: Callable[[], object], times: int = 10) -> float:
    """Of one call, behind two others."""
    for _ in range(2):
        call()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(times):
        call()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * begin.elapsed_time(end) / times


def sorting(logits_RV: Tensor, chosen: filters.Filters | None, keys_R2: Tensor, exponential: noise.Noise) -> Tensor:
    """The same choice by the operations of a library."""
    logits_RV = logits_RV.float() / _TEMPERATURE
    weights_RV = (logits_RV - logits_RV.amax(-1, keepdim=True)).exp_()
    if chosen is not None:
        weights_RV.masked_fill_(logits_RV < filters.floors(logits_RV, chosen), 0.0)
    return weights_RV.div_(exponential.exponential(keys_R2)).argmax(-1)


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=151936)
    size = parser.parse_args().vocabulary
    device = torch.device("cuda")
    exponential = noise.Noise(size, device)
    for name, options in FILTERS.items():
        for kind, dtype in (("flat", torch.bfloat16), ("edited", torch.float32)):
            figures: dict[str, Any] = {"filter": name, "logits": kind}
            for rows in ROWS:
                generator = torch.Generator(device).manual_seed(rows)
                logits_RV = (torch.randn(rows, size, device=device, generator=generator) * 0.9).to(dtype)
                params = [Sampling(temperature=_TEMPERATURE, seed=row, **options) for row in range(rows)]
                chosen = filters.filters(params, size, device)
                seeds = np.arange(rows, dtype=np.uint64)
                keys_R2 = torch.from_numpy(noise.keys(seeds, np.zeros_like(seeds))).to(device)
                temperature_R1 = torch.full((rows, 1), _TEMPERATURE, device=device)
                ids_R = torch.empty(rows, dtype=torch.int64, device=device)
                broken_R = torch.empty(rows, dtype=torch.bool, device=device)
                given = (ids_R, broken_R, logits_RV, torch.arange(rows, device=device), temperature_R1, keys_R2, chosen)
                ours = microseconds(lambda given=given: random_kernel.sample_(*given))  # type: ignore[misc]
                other = (logits_RV, chosen, keys_R2, exponential)
                theirs = microseconds(lambda other=other: sorting(*other))  # type: ignore[misc]
                same = bool((ids_R == sorting(*other)).all())
                figures[str(rows)] = {"ours_us": round(ours), "sorting_us": round(theirs), "same": same}
            print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
