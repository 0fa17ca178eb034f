"""The ladder of causes on one GPU: what each workload's seconds go to, from a profile of the device.

    python -m benchmarks.causes --size 3B [--only decode,first_token,prefill,text,sampled,rows,new,again,four,
        eight,mixed,video,answers,shared,long] [--kernels 5] [--option NAME=JSON]

Prints one JSON line per workload, in milliseconds. The workloads are those of benchmarks.gpu (`eight` is its `rows`),
and `rows`: 256 requests that mostly decode. `wall` is the time of a run without a profiler. A run with a profiler gives
the time in which the device computed for the encoder, for steps that prefill (with the tokens that decode in them), for
steps that only decode (with a greedy choice within their graph), for choosing tokens, and for copies and all else.
`host` is the rest of `wall`: the device had nothing to do. Where two kernels run at once, the one that began first is
counted. The profiler makes the host slower but not the device. `largest` names the kernels that took most, with their
share of `wall`.
"""

from __future__ import annotations

import argparse
import bisect
import functools
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu import SAMPLED, Bench
from benchmarks.shapes import SHAPES

# What the device does for a launch, by the innermost of these that it comes from.
STAGES = ("encoder", "prefill", "decode", "sampling")
OTHER = "other"
_PREFIX = "stage:"
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")


def mark_stages() -> None:
    """Mark in profiles, from now on, which stage of a step launches."""
    for owner, name, stage in methods():
        setattr(owner, name, _marked(getattr(owner, name), stage))


def methods() -> list[tuple[type, str, str]]:
    """What launches for each stage."""
    from beheld.runner.encoder_cache import EncoderCache
    from beheld.runner.graphs import DecodeGraphs
    from beheld.runner.mixed_graphs import MixedGraphs
    from beheld.runner.runner import ModelRunner

    return [
        (EncoderCache, "encode", "encoder"),
        (MixedGraphs, "replay", "prefill"),
        (ModelRunner, "_forward", "prefill"),
        (DecodeGraphs, "replay", "decode"),
        (ModelRunner, "_sample", "sampling"),
    ]


def _marked(call: Callable[..., Any], stage: str) -> Callable[..., Any]:
    import torch

    @functools.wraps(call)
    def marked(*args: Any, **options: Any) -> Any:
        with torch.profiler.record_function(_PREFIX + stage):
            return call(*args, **options)

    return marked


class Stages:
    """Which stage of a step was at work at a time of the host's.

    Args:
        marks: (start, end, stage); they nest or do not touch.
    """

    def __init__(self, marks: list[tuple[float, float, str]]) -> None:
        self._marks = sorted(marks)
        self._starts = [mark[0] for mark in self._marks]

    def at(self, when: float) -> str:
        """The innermost stage around `when`."""
        place = bisect.bisect_right(self._starts, when)
        # Nested at most once, and the inner one begins later.
        for start, end, stage in reversed(self._marks[max(0, place - 2) : place]):
            if start <= when <= end:
                return stage
        return OTHER


def causes(events: list[dict[str, Any]]) -> tuple[Counter[str], Counter[str]]:
    """Milliseconds of the device by stage and by kernel, from the events of a trace (times in microseconds)."""
    marks, launched, worked = [], {}, []
    for event in events:
        kind, name = event.get("cat"), str(event.get("name", ""))
        if kind == "user_annotation" and name.startswith(_PREFIX):
            marks.append((event["ts"], event["ts"] + event["dur"], name.removeprefix(_PREFIX)))
        elif kind in _LAUNCHES:
            launched[event["args"].get("correlation")] = event["ts"]
        elif kind in _ON_DEVICE:
            worked.append((event["ts"], event["ts"] + event["dur"], name, event["args"].get("correlation")))
    stages, by_stage, by_kernel, reached = Stages(marks), Counter[str](), Counter[str](), float("-inf")
    for start, end, name, correlation in sorted(worked):
        alone = max(0.0, end - max(start, reached)) / 1e3
        reached = max(reached, end)
        when = launched.get(correlation)
        by_stage[OTHER if when is None else stages.at(when)] += alone
        by_kernel[name] += alone
    return by_stage, by_kernel


class Profiled:
    """Workloads of a `Bench`, each run as it is and under a profiler.

    Args:
        most_tokens: new tokens of a request at most; None: as many as the workload has.
    """

    def __init__(self, bench: Bench, most_tokens: int | None = None) -> None:
        self._bench, self._most = bench, most_tokens

    def workload(self, name: str) -> tuple[Callable[[int], list[Any]], int, int]:
        """Its prompts by a seed, new tokens of each, and how often it is timed."""
        bench = self._bench
        match name:
            case "decode":
                return lambda seed: bench.text_prompts(1, 512, seed), 220, 3
            case "first_token":
                return lambda seed: bench.image_prompts(1, seed), 1, 21
            case "prefill":
                return lambda seed: bench.text_prompts(64, 1024, seed), 1, 3
            case "text" | "sampled":
                return lambda seed: bench.text_prompts(256, 512, seed), 256, 1
            case "rows":
                return lambda seed: bench.text_prompts(256, 16, seed), 64, 1
            case "eight":
                return lambda seed: bench.text_prompts(8, 512, seed), 220, 1
            case "mixed":
                return bench.mixed_prompts, 96, 1
            case "video":
                return bench.video_prompts, 64, 1
            case "answers":
                return lambda seed: bench.image_prompts(64, seed), 96, 1
            case "shared":
                return bench.shared_prompts, 128, 1
            case "long":
                return lambda seed: bench.text_prompts(16, 12_000, seed), 128, 1
            case "new":
                return lambda seed: bench.image_prompts(256, seed), 128, 1
            case "again":
                same = bench.image_prompts(256, 0)
                return lambda _: same, 128, 3
            case "four":
                return lambda seed: bench.image_prompts(64, seed, 4), 32, 1
        raise SystemExit(f"There is no workload {name!r}; there are {', '.join(WORKLOADS)}.")

    def look(self, name: str, kernels: int) -> dict[str, Any]:
        """Milliseconds by cause, and so many kernels' shares; `wall` is a median."""
        import torch

        made, new, rounds = self.workload(name)
        new = new if self._most is None else min(new, self._most)
        options = DRAWN.get(name, {})
        first = 1000 * WORKLOADS.index(name)
        walls = [self._bench.run(made(first + seed), new, **options) for seed in range(rounds + 1)][1:]
        wall = 1e3 * statistics.median(walls)
        prompts = made(first + rounds + 1)
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            self._bench.run(prompts, new, **options)
            torch.cuda.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "trace.json"
            profile.export_chrome_trace(str(trace))
            by_stage, by_kernel = causes(json.loads(trace.read_text())["traceEvents"])
        figures = {stage: round(by_stage[stage], 1) for stage in (*STAGES, OTHER)}
        # Names may be alike at their beginning.
        shortened = Counter[str]()
        for kernel, spent in by_kernel.items():
            shortened[kernel[:60]] += spent
        largest = {kernel: round(spent / wall, 3) for kernel, spent in shortened.most_common(kernels)}
        return {"wall": round(wall, 1), "host": round(wall - by_stage.total(), 1), **figures, "largest": largest}


WORKLOADS = (
    *("decode", "first_token", "prefill", "text", "sampled", "rows", "new", "again", "four"),
    *("eight", "mixed", "video", "answers", "shared", "long"),
)
DRAWN: dict[str, dict[str, Any]] = {"sampled": SAMPLED, "answers": {**SAMPLED, "n": 4}}


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=tuple(SHAPES), default="3B")
    parser.add_argument("--only", default=",".join(WORKLOADS))
    parser.add_argument("--kernels", type=int, default=5, help="how many to name")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "beheld-benchmarks")
    parser.add_argument("--option", action="append", default=[], help="NAME=JSON, an engine option")
    arguments = parser.parse_args()
    options = {name: json.loads(value) for name, value in (o.split("=", 1) for o in arguments.option)}
    mark_stages()
    profiled = Profiled(Bench(arguments.size, arguments.folder, **options))
    for name in arguments.only.split(","):
        start = time.perf_counter()
        figures = profiled.look(name, arguments.kernels)
        print(json.dumps({"size": arguments.size, "workload": name, **figures}), flush=True)
        print(f"looked at in {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
