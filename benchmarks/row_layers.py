"""A next token of a model whose layers have a form for a single row on one GPU, in few launches and as compiled.

    python -m benchmarks.row_layers [--shape GLM-Flash-16 | Qwen3.5-4B] [--lengths 512,16384] [--new 128]
        [--only few,compiled] [--small] [--seconds 80]

Starts an engine of each kind (the form's variable, see SWITCHES, is 1 and 0), with random weights in bfloat16, and
measures them in turn.
One JSON line for each engine and length: milliseconds of a next token, the least of several rounds, the floor (bytes
that it must read over the rate of a large copy), and their ratio. Then, for each engine, a line `kernel` for each
kernel of a step after the first length: microseconds of a token, and how often it is launched. A kernel's time is from
the end of the kernel that ended before it to its own end, so that all times add up to the token's; `busy` is from its
own start, which with early starts includes its wait. No further round begins after `--seconds`.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.caches import Bench, copied_bytes_per_s, shrink, state_bytes, token_bytes

KINDS = {"few": "1", "compiled": "0"}
# Shape -> the variable of its form.
SWITCHES = {"GLM-Flash-16": "BEHELD_LATENT_ROWS", "Qwen3.5-4B": "BEHELD_GATED_ROWS"}
ROUNDS = 4
_PROFILED_TOKENS = 32


def started(kind: str, shape: str, folder: Path, most: int) -> Bench:
    """Return an engine that computes single rows in this way, which has answered once."""
    switch = SWITCHES[shape]
    before = os.environ.get(switch)
    os.environ[switch] = KINDS[kind]
    options: dict[str, Any] = {"max_model_len": most, "max_num_seqs": 2, "enable_prefix_caching": False}
    options |= {"kv_cache_memory_bytes": 2 << 30}
    if shape == "Qwen3.5-4B":
        # No tower is tried.
        options |= {"limit_mm_per_prompt": {"image": 0, "video": 0}}
    try:
        bench = Bench(shape, folder / kind, **options)
        bench.run(bench.prompts(1, 64, 1), 8)
    finally:
        os.environ.pop(switch)
        if before is not None:
            os.environ[switch] = before
    return bench


def runs_s(bench: Bench, length: int, new: int) -> tuple[float, float]:
    """Return the seconds of a long and of a short answer after so many positions, of one round."""
    asked = bench.prompts(1, length, 1)
    return bench.run(asked, new + 8), bench.run(asked, 8)


def floor_bytes(path: Path, shape: str, length: int) -> int:
    """Return the bytes that a next token after so many positions must read, and write of states."""
    text = json.loads((path / "config.json").read_text(encoding="utf-8"))
    if shape == "GLM-Flash-16":
        row = 2 * text["num_hidden_layers"] * (text["kv_lora_rank"] + text["qk_rope_head_dim"])
        return token_bytes(path) + int(row) * length
    text = text["text_config"]
    attention = text["layer_types"].count("full_attention")
    row = 2 * attention * 2 * text["num_key_value_heads"] * text["head_dim"]
    return token_bytes(path) + state_bytes(path) + int(row) * length


def by_kernel(events: list[tuple[str, float, float]]) -> list[tuple[str, float, float, int]]:
    """Return each name's time up to its ends, from its starts, and number, of (name, start, end); largest first."""
    spent: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0])
    reached = min((start for _, start, _ in events), default=0.0)
    for name, start, end in sorted(events, key=lambda each: each[2]):
        entry = spent[name]
        entry[0] += max(0.0, end - reached)
        entry[1] += end - start
        entry[2] += 1
        reached = max(reached, end)
    made = [(name, own, busy, int(count)) for name, (own, busy, count) in spent.items()]
    return sorted(made, key=lambda each: -each[1])


def profiled(bench: Bench, length: int) -> tuple[list[tuple[str, float, float]], int]:
    """Return the device's kernels of next tokens after a prompt: (name, start, end), microseconds; and of how many."""
    from torch.profiler import ProfilerActivity, profile

    asked = bench.prompts(1, length, 1)
    with profile(activities=[ProfilerActivity.CUDA]) as made:
        bench.run(asked, _PROFILED_TOKENS + 1)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        made.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    found = [
        (str(event["name"]), float(event["ts"]), float(event["ts"] + event["dur"]))
        for event in events
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    found.sort(key=lambda each: each[2])
    ends = step_ends(found)
    return found[ends[0] + 1 : ends[-1] + 1], len(ends) - 1


def step_ends(found: list[tuple[str, float, float]]) -> list[int]:
    """Return where steps end, at the last of the kernels that come once a token; at least the first and the last place.

    What comes before the first of these ends is the prompt's.
    """
    places: dict[str, list[int]] = defaultdict(list)
    for index, (name, _, _) in enumerate(found):
        places[name].append(index)
    once = [each[-_PROFILED_TOKENS:] for each in places.values() if 0 <= len(each) - _PROFILED_TOKENS <= 1]
    return max(once, key=lambda each: each[-1], default=[-1, len(found) - 1])


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=tuple(SWITCHES), default="GLM-Flash-16")
    parser.add_argument("--lengths", default="512,16384")
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--only", default=",".join(KINDS))
    parser.add_argument("--small", action="store_true", help="a tiny shape, on whatever device there is")
    parser.add_argument("--seconds", type=float, default=80.0)
    given = parser.parse_args()
    begun, device = time.perf_counter(), "cuda" if torch.cuda.is_available() else "cpu"
    if given.small:
        shrink()
        given.lengths, given.new = "24,48", 4
    lengths, kinds = [int(each) for each in given.lengths.split(",")], given.only.split(",")
    with tempfile.TemporaryDirectory(prefix="beheld-row-layers-") as folder:
        benches = {}
        for kind in kinds:
            benches[kind] = started(kind, given.shape, Path(folder), max(lengths) + given.new + 64)
            print(json.dumps({"start": kind, "s": round(time.perf_counter() - begun, 1)}), flush=True)
        rate = copied_bytes_per_s(device)
        for length in lengths:
            least = dict.fromkeys(kinds, (float("inf"), float("inf")))
            for round_ in range(ROUNDS):
                for kind in kinds if round_ % 2 == 0 else reversed(kinds):
                    found = runs_s(benches[kind], length, given.new)
                    # The least of differences would prefer rounds whose short answer was slow.
                    least[kind] = min(least[kind][0], found[0]), min(least[kind][1], found[1])
                if time.perf_counter() - begun > given.seconds:
                    break
            floor = floor_bytes(benches[kinds[0]].path, given.shape, length) / rate
            for kind in kinds:
                token = (least[kind][0] - least[kind][1]) / given.new
                figures = {"kind": kind, "length": length, "next_token_ms": round(1e3 * token, 4)}
                figures |= {"floor_ms": round(1e3 * floor, 4), "of_floor": round(token / floor, 3)}
                print(json.dumps(figures | {"rounds": round_ + 1}), flush=True)
        for kind in kinds if device == "cuda" else ():
            events, tokens = profiled(benches[kind], lengths[0])
            for name, own, busy, count in by_kernel(events):
                line = {"kernel": name[:70], "kind": kind, "us": round(own / tokens, 2)}
                line |= {"busy": round(busy / tokens, 2), "times": round(count / tokens, 2)}
                print(json.dumps(line), flush=True)
        for bench in benches.values():
            bench.llm.close()


if __name__ == "__main__":
    main()
