"""Small pieces of work take turns, and leave the event loop to others."""

from __future__ import annotations

import asyncio
import time
from functools import partial

import pytest

from beheld.utils import loop_share
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


def test_clients_take_turns_and_pieces_that_are_dropped_take_none() -> None:
    async def run() -> list[str]:
        share, done = LoopShare(), list[str]()
        pieces = [partial(done.append, f"a{number}") for number in range(6)]
        for piece in pieces:
            share.do(piece, "a")
        share.do(partial(done.append, "b0"), "b")
        share.do(partial(done.append, "b1"), "b")
        for piece in pieces[2:5]:
            share.drop(piece, "a")
        # Of no use any more, or of nobody: nothing changes.
        share.drop(pieces[2], "a")
        share.drop(pieces[0], "c")
        while len(done) < 5:
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        return done

    assert asyncio.run(run()) == ["a0", "b0", "a1", "b1", "a5"]


def test_turns_that_are_given_up_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were kept, each for a turn of the loop, behind those of others."""
    monkeypatch.setattr(loop_share, "_REST_S", 60.0)

    async def run() -> list[str]:
        share, done = LoopShare(), list[str]()

        async def work(name: str) -> None:
            await share.turn()
            done.append(name)

        tasks = [asyncio.ensure_future(work(name)) for name in "abc"]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.wait(tasks, timeout=0.05)
        tasks[2].cancel()
        await asyncio.wait(tasks)
        assert not share._lines
        return done

    assert asyncio.run(run()) == ["a"]
