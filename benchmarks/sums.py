"""What a sum over GPUs costs by its size: NCCL's, and ours that writes to the other GPUs' memory.

    python -m benchmarks.sums [--ranks 2] [--width 5120] [--device cpu]

Prints, for bfloat16 rows of `--width` numbers, microseconds of a sum on the device, from a CUDA graph of 64 sums that
is replayed ten times. The third line is what experts would take in place of a sum if each rank kept some of the tokens:
two exchanges of all ranks with all, one to the ranks with the experts and one back. A token takes so many experts that
nearly each token goes to nearly each rank, so the exchanges are of equal parts.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048, 8192)
_CALLS, _REPLAYS = 64, 10
WAYS = (("NCCL", "0", False), ("ours", "1", False), ("exchange", "0", True))


def rank(number: int, given: argparse.Namespace) -> None:
    """Measure; the first rank prints."""
    import torch
    from torch import distributed

    from beheld.parallel.group import RankGroup
    from beheld.platform.registry import platform_of

    on_gpu = given.device == "cuda"
    group = RankGroup(number, given.ranks, given.folder, platform_of(given.device).collectives, lambda: None)
    # Its stubs lack what is used here.
    dist: Any = distributed
    options = dist.AllToAllOptions()
    options.asyncOp = False

    def exchange(x: torch.Tensor) -> None:
        there, back = torch.empty_like(x), torch.empty_like(x)
        for source, target in ((x, there), (there, back)):
            work = group._device.alltoall_base(target, source, [], [], options)
            if work is not None:
                work.wait()

    def microseconds(rows: int) -> float:
        # An exchange is of equal parts.
        rows = max(rows, given.ranks) if given.exchange else rows
        x = torch.zeros(rows, given.width, dtype=torch.bfloat16, device=given.device)
        group.sum_(x)
        call = exchange if given.exchange else group.sum_
        call(x)
        return _on_gpu(call, x, group) if on_gpu else _on_cpu(call, x, group)

    found = [microseconds(rows) for rows in ROWS]
    if number == 0:
        print(" ".join(f"{spent:8.2f}" for spent in found), flush=True)
    group.close()


def _on_gpu(call: Callable[[Any], None], x: Any, group: Any) -> float:
    import torch

    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(_CALLS):
            call(x)
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    group.least([0])
    start.record()
    for _ in range(_REPLAYS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * float(start.elapsed_time(end)) / (_CALLS * _REPLAYS)


def _on_cpu(call: Callable[[Any], None], x: Any, group: Any) -> float:
    group.least([0])
    start = time.perf_counter()
    for _ in range(_REPLAYS):
        call(x)
    return 1e6 * (time.perf_counter() - start) / _REPLAYS


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=5120)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--exchange", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        rank(given.rank, given)
        return
    print(f"{'rows':13}" + " ".join(f"{rows:8}" for rows in ROWS))
    for name, switch, exchange in WAYS:
        print(f"{name + ', us':13}", end="", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            processes = []
            for number in range(given.ranks):
                command = [sys.executable, "-m", "benchmarks.sums", "--ranks", str(given.ranks)]
                command += ["--width", str(given.width), "--rank", str(number), "--folder", folder]
                command += ["--device", given.device, *(["--exchange"] if exchange else [])]
                environment = os.environ | {"CUDA_VISIBLE_DEVICES": str(number), "BEHELD_PEER_SUMS": switch}
                processes.append(subprocess.Popen(command, env=environment))
            for process in processes:
                process.wait()


if __name__ == "__main__":
    main()
