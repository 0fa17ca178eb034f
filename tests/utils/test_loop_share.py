"""Small pieces of work take turns, and leave the event loop to others."""

from __future__ import annotations

import asyncio
import time

from beheld.utils.loop_share import LoopShare


def test_pieces_are_done_in_order_and_others_run_between_them() -> None:
    async def run() -> tuple[list[int], int]:
        share, done, between = LoopShare(), list[int](), 0

        def piece(number: int) -> None:
            time.sleep(0.001)
            done.append(number)

        for number in range(20):
            share.do(lambda number=number: piece(number))  # type: ignore[misc]
        while len(done) < 20:
            between += 1
            await asyncio.sleep(0)
        return done, between

    done, between = asyncio.run(run())
    assert done == list(range(20))
    assert between >= 20


def test_turns_are_waited_for_and_may_be_given_up() -> None:
    share = LoopShare()

    async def run() -> list[str]:
        done = []

        async def work(name: str) -> None:
            for _ in range(3):
                await share.turn()
                done.append(name)

        left = asyncio.ensure_future(work("left"))
        await asyncio.sleep(0)
        left.cancel()
        await asyncio.gather(work("a"), work("b"))
        return done

    # In one loop after the other, too.
    assert asyncio.run(run()) == ["a", "b"] * 3
    assert asyncio.run(run()) == ["a", "b"] * 3
