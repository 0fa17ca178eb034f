"""What scheduling costs: many text requests through the fake device of the tests.

    python -m benchmarks.scheduler [--requests 10000] [--profile]

Prints one JSON line. `us_per_sequence_step` is the time of schedule() and update() together, divided by the number of
slices: what the host pays for one sequence in one step.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import random
import time
from collections.abc import Iterator

from beheld.core.plan import StepPlan
from beheld.core.request import Request
from beheld.scheduler.scheduler import Scheduler
from tests.fakes import FULL, FakeRunner, fake_capacity, fake_config, fake_info, fake_request, sliding


def requests(count: int, rng: random.Random) -> Iterator[Request]:
    """Prompts of 64 to 512 tokens, a third of which start with the same 128; answers of 32 to 256 tokens."""
    common = tuple(rng.randrange(3, 90) for _ in range(128))
    for index in range(count):
        own = tuple(rng.randrange(3, 90) for _ in range(rng.randrange(64, 513)))
        prompt = common + own[128:] if index % 3 == 0 and len(own) > 128 else own
        yield fake_request(str(index), prompt, max_tokens=rng.randrange(32, 257), stop_ids=frozenset({1000}))


def measure(count: int, *, overlap: bool, slide: bool) -> dict[str, float | int | bool]:
    """Run `count` requests; times in microseconds."""
    groups = (FULL, sliding(128)) if slide else (FULL,)
    info = fake_info(*groups)
    config = fake_config(
        max_model_len=4096, max_num_seqs=256, max_num_batched_tokens=8192, block_size=16, overlap=overlap
    )
    capacity = fake_capacity(info, config, 12_000)
    scheduler = Scheduler(config, info, capacity)
    runner = FakeRunner(config, info, capacity, verify=False)
    spent_add = spent = 0.0
    for request in requests(count, random.Random(0)):
        start = time.perf_counter()
        scheduler.add(request)
        spent_add += time.perf_counter() - start
    slices = steps = tokens = 0
    in_flight: StepPlan | None = None
    while scheduler.has_work or in_flight is not None:
        start = time.perf_counter()
        plan = scheduler.schedule()
        spent += time.perf_counter() - start
        done = in_flight if overlap else plan
        in_flight = plan if overlap else None
        if plan is not None:
            runner.launch(plan)
            slices += len(plan.slices)
            tokens += plan.num_tokens
            steps += 1
        if done is not None:
            result = runner.collect(done)
            start = time.perf_counter()
            scheduler.update(done, result)
            spent += time.perf_counter() - start
    stats = scheduler.stats()
    return {
        "overlap": overlap,
        "kv_groups": len(groups),
        "requests": count,
        "steps": steps,
        "sequence_steps": slices,
        "tokens": tokens,
        "us_per_sequence_step": round(spent / slices * 1e6, 2),
        "us_per_add": round(spent_add / count * 1e6, 2),
        "preemptions": stats.num_preemptions,
        "prefix_hit_tokens": stats.prefix_hits,
    }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("--sliding", action="store_true", help="a second, sliding KV group")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    profile = cProfile.Profile()
    if args.profile:
        profile.enable()
    report = measure(args.requests, overlap=args.overlap, slide=args.sliding)
    profile.disable()
    print(json.dumps(report))
    if args.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(20)


if __name__ == "__main__":
    main()
