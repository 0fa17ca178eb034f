"""One engine against several: throughput with images that repeat, what routing finds, and what the front costs.

    python -m benchmarks.data_parallel --model Qwen/Qwen2.5-VL-3B-Instruct --engines 1,2

Each size gets the same conversations, `--concurrency` for each engine at a time. It gives the time by the clock and the
processor time: on a CPU with busy cores, the engines' own seconds say how long the run would take with a core for each.
The speed-up by processor time is that of one engine over the greatest of several, because they run side by side.

Cores of one machine may not be independent: a step may take longer while another core computes, whatever it computes.
With `--busy-cores 1` a process that needs hardly any memory computes next to one engine, and none next to two: what two
take more than one next to a busy core is theirs. The number of steps says whether their batches were as full.

With `--rounds`, all sizes are measured again and again in turn, and the medians of the rounds' speed-ups come last.

The busiest threads say what bounds a run: one that computes for nearly all of the clock's time is the bound.

With --stacks, as many conversations follow of which py-spy, a program of its own, writes where the threads of the front
and of the first engine are: lines `frame;frame;... count`, a hundred samples a second, of threads that hold the
interpreter's lock alone for the front (FILE), of all that do not sleep for the engine (FILE.engine).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from beheld import SamplingParams
from beheld.api.async_llm import AsyncLLM, EngineStats


@dataclass(frozen=True)
class Measured:
    """A run.

    Attributes:
        clock_s: seconds by the clock.
        engines_s, front_s, workers_s: processor seconds of each engine, of the front's own process, and of the
            processes with which it prepares media.
        busiest: by process, the shares of the clock's time for which its three busiest threads computed.
        stages: a request's milliseconds in each stage, in the mean; "image ..." are those of preparing its image.
        steps: of all engines together.
    """

    clock_s: float
    engines_s: list[float]
    front_s: float
    workers_s: float
    busiest: dict[str, list[float]]
    stages: dict[str, float]
    answers: list[tuple[int, ...]]
    steps: int
    stats: EngineStats


def processor_s(pid: int | str) -> float:
    """Processor seconds of a process so far, all its threads together."""
    words = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, and those that they have."""
    try:
        found = [file.read_text(encoding="ascii") for file in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:
        # It has ended.
        return []
    own = [int(word) for text in found for word in text.split()]
    return [*own, *(further for child in own for further in descendants(child))]


def threads_s(pid: int) -> dict[str, float]:
    """Processor seconds of a process's threads so far, by their numbers."""
    found = {}
    for file in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(OSError):
            found[file.parent.name] = processor_s(f"{pid}/task/{file.parent.name}")
    return found


# Products of matrices that fit into a core's first cache.
_COMPUTE = "import numpy; small = numpy.ones((32, 32), 'f4')\nwhile True: small @ small"


@contextmanager
def busy(num_cores: int) -> Iterator[None]:
    """Let so many other processes compute inside the block, each in one thread."""
    single = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    running = [subprocess.Popen([sys.executable, "-c", _COMPUTE], env=single) for _ in range(num_cores)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def spent() -> dict[str, dict[int, float]]:
    """Processor seconds so far of the front, of engines and of what else the front has started, by process."""
    found: dict[str, dict[int, float]] = {"front": {os.getpid(): processor_s("self")}, "engines": {}, "workers": {}}
    for pid in descendants(os.getpid()):
        with suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if _COMPUTE.encode() not in command:
                found["engines" if b"beheld.engine.process" in command else "workers"][pid] = processor_s(pid)
    return found


def conversations(count: int, num_images: int, size: int, repeats: bool, first: int = 0) -> list[list[dict[str, Any]]]:
    """Questions about images in random order, each image asked about equally often; `first` numbers the first image."""
    draw = random.Random(0)
    order = [first + (number % num_images if repeats else number) for number in range(count)]
    draw.shuffle(order)
    images = {
        number: Image.fromarray(np.random.default_rng(number).integers(0, 255, (size, size, 3), dtype=np.uint8))
        for number in set(order)
    }
    return [
        [
            {
                "role": "user",
                "content": [
                    {"type": "image_pil", "image_pil": images[image]},
                    {"type": "text", "text": f"Question {number}: what do you see?"},
                ],
            }
        ]
        for number, image in enumerate(order)
    ]


async def measure(num_engines: int, given: argparse.Namespace, options: dict[str, Any]) -> Measured:
    """Answer all conversations with so many engines."""
    params = SamplingParams(temperature=0.0, max_tokens=given.max_tokens, ignore_eos=True)
    talks = conversations(given.requests, given.images, given.size, not given.no_repeats)
    places = asyncio.Semaphore(given.concurrency * num_engines)
    stages: Counter[str] = Counter()
    async with AsyncLLM(given.model, engine="process", data_parallel_size=num_engines, **options) as llm:

        async def answer(talk: list[dict[str, Any]]) -> tuple[int, ...]:
            async with places:
                async for output in llm.chat(talk, params, pieces="final"):
                    found = tuple(output.outputs[0].token_ids)
            stages.update(output.milliseconds)
            stages.update({f"image {stage}": ms for stage, ms in output.media[0].milliseconds.items()})
            return found

        # Images that are not of the run: caches are warm in size, not in content.
        warm = conversations(4 * num_engines, 10**6, given.size, repeats=False)
        for talk in warm:
            talk[0]["content"][0]["image_pil"] = talk[0]["content"][0]["image_pil"].transpose(Image.Transpose.ROTATE_90)
        await asyncio.gather(*map(answer, warm))
        stages.clear()
        before = spent()
        engines = list(before["engines"])
        names = {os.getpid(): "front"} | {pid: f"engine {number}" for number, pid in enumerate(engines)}
        threads = {pid: threads_s(pid) for pid in names}
        steps = (await llm.ping()).steps
        begin = time.perf_counter()
        answers = await asyncio.gather(*map(answer, talks))
        clock_s, after = time.perf_counter() - begin, spent()
        means = {stage: ms / given.requests for stage, ms in stages.items()}
        busiest = {
            name: sorted((s - threads[pid].get(tid, 0.0) for tid, s in threads_s(pid).items()), reverse=True)[:3]
            for pid, name in names.items()
        }
        took = {
            kind: [seconds - before[kind].get(pid, 0.0) for pid, seconds in own.items()] for kind, own in after.items()
        }
        stats = await llm.ping()
        steps = stats.steps - steps
        if given.stacks is not None:
            talks = conversations(given.requests, given.images, given.size, not given.no_repeats, first=10**7)
            record = ["py-spy", "record", "--threads", "--duration", str(max(2, int(clock_s))), "--format", "raw"]
            front = [*record, "--gil", "--pid", str(os.getpid()), "--output", str(given.stacks)]
            engine = [*record, "--pid", str(engines[0]), "--output", f"{given.stacks}.engine"]
            with (
                subprocess.Popen(front, stdout=subprocess.DEVNULL),
                subprocess.Popen(engine, stdout=subprocess.DEVNULL),
            ):
                await asyncio.gather(*map(answer, talks))
        shares = {name: [seconds / clock_s for seconds in each] for name, each in busiest.items()}
        return Measured(
            clock_s,
            took["engines"],
            sum(took["front"]),
            sum(took["workers"]),
            shares,
            means,
            list(answers),
            steps,
            stats,
        )


def measured(given: argparse.Namespace, options: dict[str, Any]) -> dict[int, float]:
    """Measure each number of engines and print; return the speed-ups by processor time."""
    first: Measured | None = None
    speeds: dict[int, float] = {}
    for num_engines in map(int, given.engines.split(",")):
        with busy(max(0, given.busy_cores - num_engines + 1)):
            found = asyncio.run(measure(num_engines, given, options))
        first = first or found
        same = sum(one == other for one, other in zip(first.answers, found.answers, strict=True))
        print(f"{num_engines} engines: {given.requests / found.clock_s:.2f} requests/s by the clock", end="; ")
        print(f"{first.clock_s / found.clock_s:.2f} times the first", end="; ")
        print(f"engines' processor time {', '.join(f'{s:.2f}' for s in found.engines_s)} s", end=": ")
        speeds[num_engines] = max(first.engines_s) / max(found.engines_s)
        print(f"{speeds[num_engines]:.2f} times the first", end="; ")
        print(f"the front's {1e3 * found.front_s / given.requests:.2f} ms a request", end=", ")
        print(f"its workers' {1e3 * found.workers_s / given.requests:.2f}", flush=True)
        busiest = "; ".join(f"{name} {', '.join(f'{s:.2f}' for s in each)}" for name, each in found.busiest.items())
        print(f"   busiest threads, of the clock's time: {busiest}")
        print(f"   milliseconds of a request: {', '.join(f'{stage} {ms:.1f}' for stage, ms in found.stages.items())}")
        print(
            f"   {same} of {len(found.answers)} answers are the first's; {found.stats.scheduler.num_encoded} encoded",
            end="; ",
        )
        print(f"{found.steps} steps")
        if (routing := found.stats.routing) is not None:
            print(f"   routing: {routing.num_found} of {routing.num_repeated} repeated images found", end="; ")
            print(f"{1e6 * routing.seconds / max(1, routing.num_requests):.0f} microseconds a request", end="; ")
            print(f"{routing.found_tokens} of {routing.prefix_tokens} cached prompt tokens found")
        for each in found.stats.engines:
            if each.stats is not None:
                counts = each.stats.scheduler
                print(
                    f"   engine {each.engine}: {each.stats.steps} steps, {counts.num_encoded} encoded, "
                    f"{counts.prefix_hits} of {counts.prefix_queries} prompt tokens cached, {counts.num_blocks} blocks"
                )
    return speeds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="a folder or a hub name; without it, mote")
    parser.add_argument("--engines", default="1,2", help="numbers of engines, separated by commas")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--images", type=int, default=50, help="different images")
    parser.add_argument("--no-repeats", action="store_true", help="an image of its own for each request")
    parser.add_argument("--size", type=int, default=448, help="pixels of an image's side")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--concurrency", type=int, default=16, help="requests at a time for each engine")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--load-format", default="auto", help="`dummy` takes random weights, the same in each engine")
    parser.add_argument("--kv-cache-gib", type=float, default=None, help="of each engine; without it, what is free")
    parser.add_argument(
        "--stacks", type=Path, default=None, help="a file for where threads are, with .engine for those of an engine"
    )
    parser.add_argument(
        "--busy-cores", type=int, default=0, help="cores next to the first engine's that compute, if not for engines"
    )
    parser.add_argument("--rounds", type=int, default=1, help="how many times all sizes are measured, in turn")
    parser.add_argument(
        "--media-work", default="auto", help="`process`: workers prepare media, as they do where the engine has a GPU"
    )
    parser.add_argument("--media-workers", type=int, default=None)
    given = parser.parse_args()
    options: dict[str, Any] = {
        "max_model_len": given.max_model_len,
        "dtype": given.dtype,
        "load_format": given.load_format,
        "seed": 0,
        "disable_log_stats": True,
        "media_work": given.media_work,
        "media_workers": given.media_workers,
    }
    if given.kv_cache_gib is not None:
        options["kv_cache_memory_bytes"] = int(given.kv_cache_gib * 2**30)
    speeds: dict[int, list[float]] = {}
    for number in range(given.rounds):
        if given.rounds > 1:
            print(f"Round {number + 1}:")
        for num_engines, speed in measured(given, options).items():
            speeds.setdefault(num_engines, []).append(speed)
    if given.rounds > 1:
        for num_engines, found in speeds.items():
            print(f"{num_engines} engines, by processor time: {statistics.median(found):.2f} times the first", end=" ")
            print(f"in the median of {len(found)} rounds, from {min(found):.2f} to {max(found):.2f}")


if __name__ == "__main__":
    main()
