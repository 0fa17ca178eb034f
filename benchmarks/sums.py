"""What a sum over GPUs costs by its size: NCCL's, and ours that writes to the other GPUs' memory.

    python -m benchmarks.sums [--ranks 2] [--width 5120]

Prints, for bfloat16 rows of `--width` numbers, microseconds of a sum on the device, from a CUDA graph of 64 sums that
is replayed ten times.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_SUMS, _REPLAYS = 64, 10


def rank(number: int, ranks: int, width: int, folder: Path) -> None:
    """Measure; the first rank prints."""
    import torch

    from beheld.parallel.group import RankGroup

    group = RankGroup(number, ranks, folder, "nccl", lambda: None)

    def microseconds(rows: int) -> float:
        x = torch.zeros(rows, width, dtype=torch.bfloat16, device="cuda")
        group.sum_(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(_SUMS):
                group.sum_(x)
        graph.replay()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        group.least([0])
        start.record()
        for _ in range(_REPLAYS):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        del graph
        return 1e3 * float(start.elapsed_time(end)) / (_SUMS * _REPLAYS)

    found = [microseconds(rows) for rows in ROWS]
    if number == 0:
        print(" ".join(f"{spent:8.2f}" for spent in found), flush=True)
    group.close()


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=5120)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        rank(given.rank, given.ranks, given.width, given.folder)
        return
    print("rows       " + " ".join(f"{rows:8}" for rows in ROWS))
    for name, switch in (("NCCL", "0"), ("ours", "1")):
        print(f"{name}, us   ", end="", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            processes = []
            for number in range(given.ranks):
                command = [sys.executable, "-m", "benchmarks.sums", "--ranks", str(given.ranks)]
                command += ["--width", str(given.width), "--rank", str(number), "--folder", folder]
                environment = os.environ | {"CUDA_VISIBLE_DEVICES": str(number), "BEHELD_PEER_SUMS": switch}
                processes.append(subprocess.Popen(command, env=environment))
            for process in processes:
                process.wait()


if __name__ == "__main__":
    main()
