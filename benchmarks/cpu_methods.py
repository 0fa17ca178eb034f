"""beheld on a CPU by form of the weights: each form in turn, each run in a process of its own.

    python -m benchmarks.cpu --methods bfloat16 int8 int4 --rounds 3      prints each run, then a table of medians
    python -m benchmarks.cpu --methods bfloat16 int8 int4 --starts --rounds 5   starts alone
    python -m benchmarks.cpu_methods METHOD PATH [--start]                    one run; prints one JSON line

The checkpoint has 0.43 B parameters in Qwen2.5-VL shape, random weights, stored in bfloat16 (in float32 for float32).
Activations of int8 and int4 have the default type: bfloat16 where the CPU multiplies it in hardware, float32 elsewhere.
`cpu_ms` is the process's own time for one token, `start_cpu_s` that of a start, all threads: other programs on the
machine change these less than the clock.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# Form of the weights -> engine options.
METHODS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
}
_SHORT, _TOKENS = 64, 64
_REPEATS = 5
# The side of an image, and the tokens of an answer to one.
_IMAGE, _ANSWER = 448, 128


def measure(method: str, path: str, *, start_alone: bool = False) -> dict[str, float]:
    """Return the figures of one form: milliseconds, tokens/s, seconds to start, and GiB at the peak.

    Args:
        method: one of METHODS.
        path: of the checkpoint.
        start_alone: leave out what needs requests; the peak is that of the start then.
    """
    import numpy as np
    from PIL import Image

    from benchmarks.cpu import PROMPT

    started, started_cpu = time.perf_counter(), time.process_time()
    from beheld import LLM, SamplingParams

    llm = LLM(path, max_model_len=2048, max_num_seqs=16, enable_prefix_caching=False, **METHODS[method])
    start = {"start_s": time.perf_counter() - started, "start_cpu_s": time.process_time() - started_cpu}
    if start_alone:
        return start | {"peak_gib": peak_gib()}
    rng = np.random.default_rng(0)

    def run(prompts: Sequence[Any], tokens: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        llm.generate(list(prompts), params, use_tqdm=False)

    def ids(count: int) -> dict[str, Any]:
        return {"prompt_token_ids": rng.integers(5, 400, count).tolist()}

    def image() -> dict[str, Any]:
        pixels = rng.integers(0, 256, (_IMAGE, _IMAGE, 3), dtype=np.uint8)
        return {"prompt": PROMPT, "multi_modal_data": {"image": Image.fromarray(pixels)}}

    first = _median(lambda: run([ids(_SHORT)], 1))
    many = _median(lambda: run([ids(_SHORT)], 1 + _TOKENS))
    batch = _median(lambda: run([ids(_SHORT) for _ in range(16)], _TOKENS), repeats=2)
    prefill = _median(lambda: run([ids(512)], 1))
    seen = _median(lambda: run([image()], 1))
    answered = _median(lambda: run([image()], _ANSWER), repeats=3)
    return {
        "prefill_512_ms": prefill[0] * 1e3,
        "next_token_ms": (many[0] - first[0]) / _TOKENS * 1e3,
        "cpu_ms": (many[1] - first[1]) / _TOKENS * 1e3,
        "tokens_per_s_16": 16 * _TOKENS / batch[0],
        "image_448_ms": seen[0] * 1e3,
        "image_and_128_s": answered[0],
        **start,
        "peak_gib": peak_gib(),
    }


def peak_gib() -> float:
    """Return the most memory that this process had."""
    # The greatest that `getrusage` knows is the parent's, whose memory a child has until it begins its own program.
    with open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    return int(fields["VmHWM"].split()[0]) / 2**20


def _median(act: Callable[[], object], repeats: int = _REPEATS) -> tuple[float, float]:
    """Return the medians of an act's seconds and of this process's seconds on the CPU, after one to warm up."""
    found: list[tuple[float, float]] = []
    for _ in range(repeats + 1):
        wall, own = time.perf_counter(), time.process_time()
        act()
        found.append((time.perf_counter() - wall, time.process_time() - own))
    walls, owns = zip(*found[1:], strict=True)
    return statistics.median(walls), statistics.median(owns)


def compare(methods: Sequence[str], rounds: int, folder: Path, *, starts: bool = False) -> None:
    """Run the forms in turn, or start them alone, and print each run, then a table of medians."""
    from benchmarks.checkpoints import qwen2_5_vl_bfloat16, qwen2_5_vl_small

    found: dict[str, list[dict[str, float]]] = {method: [] for method in methods}
    for _ in range(rounds):
        for method in methods:
            path = qwen2_5_vl_small(folder) if method == "float32" else qwen2_5_vl_bfloat16(folder)
            command = [sys.executable, "-m", "benchmarks.cpu_methods", method, str(path), *["--start"] * starts]
            # Bytecode is kept, as where beheld is installed: without, each start compiles our own modules again.
            environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
            environment["HF_HUB_OFFLINE"] = "1"
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
            if done.returncode != 0:
                sys.exit(f"{method} failed:\n{done.stderr[-3000:]}")
            found[method].append(json.loads(done.stdout.strip().splitlines()[-1]))
            print(json.dumps({"method": method} | found[method][-1]), flush=True)
    columns = list(found[methods[0]][0])
    print("| method | " + " | ".join(columns) + " |\n|" + "---|" * (len(columns) + 1))
    for method, runs in found.items():
        medians = [statistics.median(run[column] for run in runs) for column in columns]
        print(f"| {method} | " + " | ".join(f"{value:.4g}" for value in medians) + " |")


if __name__ == "__main__":
    print(json.dumps(measure(*sys.argv[1:3], start_alone="--start" in sys.argv[3:])))
