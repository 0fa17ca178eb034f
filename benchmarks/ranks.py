"""Ranks that share a model, next to one device: whether they give the same tokens, and how fast.

    python -m benchmarks.ranks --size 3B --ranks 2 [--dtype float32] [--eager] [--towers data] [--device cpu]
    python -m benchmarks.ranks --size 3B --ranks 1 --stages 2 [--in-turn]

Runs one device first, then the ranks, each in a process of its own, on real shapes with the same random weights. Prints
one JSON line for each, and one that compares them: in float32 all tokens are the same; in bfloat16 the order of sums
changes roundings, and with random weights, whose logits lie close, an answer soon takes another way.

`processor_s` are processor seconds of each rank for the same work as the figure that it follows. On busy cores they say
what the clock does not: how long the ranks would compute with a core for each, without their waits for one another.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.data_parallel import processor_s
from benchmarks.gpu import Bench
from benchmarks.shapes import SHAPES

# New images are measured so often, because one run is short.
_ROUNDS = 5


def spent(bench: Bench) -> list[float]:
    """Processor seconds of each rank's process so far."""
    others = getattr(bench.llm._live().core.executor, "_ranks", [])
    return [processor_s("self"), *(processor_s(rank.process.pid) for rank in others)]


def measured(arguments: argparse.Namespace) -> dict[str, Any]:
    """Figures and tokens of one engine with `arguments.ranks` ranks in each of `arguments.stages` stages."""
    options: dict[str, Any] = {"tensor_parallel_size": arguments.ranks, "dtype": arguments.dtype}
    options["pipeline_parallel_size"] = arguments.stages
    options |= {"enforce_eager": arguments.eager, "mm_encoder_tp_mode": arguments.towers}
    if arguments.device is not None:
        options["device"] = arguments.device
    if arguments.ranks * arguments.stages > 1:
        options["distributed_executor_backend"] = "mp"
        if arguments.in_turn:
            options["async_scheduling"] = False
    bench = Bench(arguments.size, arguments.folder, max_model_len=2048, **options)
    many, tokens = arguments.rows, arguments.tokens
    one = bench.text_prompts(1, 100, 1)
    batch = bench.text_prompts(many, 100, 2)
    images = bench.image_prompts(4, 3)
    # Compiled and captured before it is measured.
    for prompts in (one, batch, images):
        bench.run(prompts, 8)
    found: dict[str, Any] = {"ranks": arguments.ranks, "stages": arguments.stages}
    found["start_s"] = round(bench.start_s, 2)
    before = spent(bench)
    seconds = bench.run(bench.text_prompts(1, 100, 4), tokens)
    found["ms_per_token_one_row"] = round(1e3 * seconds / tokens, 3)
    one_row = spent(bench)
    seconds = bench.run(bench.text_prompts(many, 100, 5), tokens)
    found[f"tokens_per_s_{many}_rows"] = round(many * tokens / seconds, 1)
    rows = spent(bench)
    found["processor_s_one_row"] = [round(b - a, 2) for a, b in zip(before, one_row, strict=True)]
    found[f"processor_s_{many}_rows"] = [round(b - a, 2) for a, b in zip(one_row, rows, strict=True)]
    seconds = [bench.run(bench.image_prompts(4, seed), 1) for seed in range(6, 6 + _ROUNDS)]
    found["s_4_images"] = round(statistics.median(seconds), 3)
    each = [(b - a) / _ROUNDS for a, b in zip(rows, spent(bench), strict=True)]
    found["processor_s_4_images"] = [round(number, 2) for number in each]
    params = bench._params(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    outputs = bench.llm.generate([*one, *batch[:7], *images], params, use_tqdm=False)
    found["tokens"] = [list(output.outputs[0].token_ids) for output in outputs]
    bench.llm.close()
    return found


def compared(first: list[list[int]], second: list[list[int]]) -> dict[str, Any]:
    """How many answers are the same, and how many tokens before the first other one."""
    common = [
        next((place for place, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))
        for one, other in zip(first, second, strict=True)
    ]
    same = sum(count == len(one) for count, one in zip(common, first, strict=True))
    return {"answers": len(first), "same": same, "same_first_tokens": common}


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=tuple(SHAPES), default="3B")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--in-turn", action="store_true", help="each step passes all stages before the next begins")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--towers", choices=("weights", "data"), default="weights")
    parser.add_argument("--device")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "beheld-benchmarks")
    parser.add_argument("--only", action="store_true", help="measure the ranks alone, and print the tokens too")
    arguments = parser.parse_args()
    if arguments.only:
        print(json.dumps(measured(arguments)), flush=True)
        return
    found = []
    for ranks, stages in ((1, 1), (arguments.ranks, arguments.stages)):
        split = ["--ranks", str(ranks), "--stages", str(stages)]
        command = [sys.executable, "-m", "benchmarks.ranks", *sys.argv[1:], *split, "--only"]
        lines = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
        found.append(json.loads(lines[-1]))
        print(json.dumps({name: value for name, value in found[-1].items() if name != "tokens"}), flush=True)
    print(json.dumps(compared(found[0]["tokens"], found[1]["tokens"])), flush=True)


if __name__ == "__main__":
    main()
