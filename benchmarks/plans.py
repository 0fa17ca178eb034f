"""What it costs to send a step's plan from the first rank to the others, by the number of rows.

    python -m benchmarks.plans [--rows 1,64,256] [--ranks 2]

Prints microseconds of processor time, medians of 500: of the first rank, from the plan to the end of the last send, and
of another one, from the arrived frame to the plan. Every sixteenth row has a new block, as in steps that decode.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

from beheld.core.plan import SeqSlice, StepPlan
from beheld.executor.wire import CODEC, packed, unpacked
from beheld.wire.codec import Encoded
from beheld.wire.link import Link, pair

_ROUNDS, _WARM = 500, 50


def plan_of(rows: int, number: int) -> StepPlan:
    """A step in which so many rows decode."""
    slices = tuple(SeqSlice(row, 100, 101, ((row,) if row % 16 == number % 16 else (),), 1) for row in range(rows))
    return StepPlan(number, slices)


def receive(link: Link, rounds: int) -> float:
    """Median of the other rank."""
    spent = []
    for _ in range(rounds):
        # The wait for a frame takes no processor time.
        start = time.thread_time()
        unpacked(link.receive(), 1)
        spent.append(time.thread_time() - start)
    return statistics.median(spent[_WARM:])


def measure(rows: int, ranks: int) -> tuple[float, float]:
    """Microseconds of the first rank and of another one; each of the others is a process of its own."""
    reading, writing = os.pipe()
    rounds, links, children = _ROUNDS + _WARM, list[Link](), list[int]()
    for _ in range(1, ranks):
        ours, theirs = pair()
        child = os.fork()
        if child == 0:
            try:
                ours.close()
                os.write(writing, f"{receive(Link(theirs, CODEC, 2), rounds)}\n".encode())
            finally:
                os._exit(0)
        theirs.close()
        children.append(child)
        links.append(Link(ours, CODEC, 2))
    os.close(writing)
    spent = []
    for number in range(rounds):
        plan = plan_of(rows, number)
        start = time.thread_time()
        step = Encoded(CODEC.encode(packed(plan)))
        for link in links:
            link.send(step)
        spent.append(time.thread_time() - start)
    with os.fdopen(reading) as answers:
        other = statistics.median(map(float, answers))
    for child, link in zip(children, links, strict=True):
        os.waitpid(child, 0)
        link.close()
    return 1e6 * statistics.median(spent[_WARM:]), 1e6 * other


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,64,256")
    parser.add_argument("--ranks", type=int, default=2)
    given = parser.parse_args()
    for rows in map(int, given.rows.split(",")):
        first, other = measure(rows, given.ranks)
        print(f"{rows} rows: the first rank {first:.0f} us, another one {other:.0f}", flush=True)


if __name__ == "__main__":
    main()
