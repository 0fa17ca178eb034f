"""Clients take turns at workers, and long tasks of one keep another's waiting for a second (case 109)."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from beheld.core.errors import WorkerError
from beheld.sandbox.client_turns import ClientTurn, ClientTurns
from beheld.utils.cancellation import Cancelled, CancelToken
from tests.sandbox.test_sandbox import make

pytestmark = pytest.mark.case(109)


def wait_for(turns: ClientTurns, count: int) -> None:
    """Until so many turns are waited for."""
    until = time.monotonic() + 5
    while sum(map(len, turns._waiting.values())) != count:
        assert time.monotonic() < until
        time.sleep(0.001)


def test_clients_are_served_by_turns() -> None:
    turns, order = ClientTurns(1, patience_s=60), list[str]()
    first = turns.take("a", CancelToken())

    def work(name: str) -> None:
        turn = turns.take(name[0], CancelToken())
        order.append(name)
        turns.give_back(turn)

    with ThreadPoolExecutor(6) as pool:
        for count, name in enumerate(("a1", "a2", "a3", "b1", "b2", "c1"), 1):
            pool.submit(work, name)
            wait_for(turns, count)
        turns.give_back(first)
    assert order[:3] == ["b1", "c1", "a1"] or order[:3] == ["a1", "b1", "c1"]
    assert [name for name in order if name[0] == "a"] == ["a1", "a2", "a3"]
    assert order.index("b2") < order.index("a3")


def test_who_holds_fewest_comes_first() -> None:
    turns = ClientTurns(2, patience_s=60)
    held = [turns.take("a", CancelToken()) for _ in range(2)]
    got: dict[str, ClientTurn] = {}
    threads = [
        threading.Thread(target=lambda name=name: got.setdefault(name, turns.take(name, CancelToken())))
        for name in ("a", "b")
    ]
    for count, thread in enumerate(threads, 1):
        thread.start()
        wait_for(turns, count)
    turns.give_back(held.pop())
    threads[1].join(5)
    assert list(got) == ["b"]
    turns.give_back(held.pop())
    threads[0].join(5)
    assert list(got) == ["b", "a"]


def test_who_leaves_keeps_nobody_behind_waiting_and_closing_tells_all() -> None:
    turns = ClientTurns(1, patience_s=60)
    held = turns.take("a", CancelToken())
    cancel, ended = CancelToken(), list[str]()

    def wait(client: str, cancel: CancelToken) -> None:
        try:
            turns.take(client, cancel)
            ended.append(f"{client} served")
        except (Cancelled, WorkerError) as error:
            ended.append(f"{client} {type(error).__name__}")

    threads = [threading.Thread(target=wait, args=given) for given in (("b", cancel), ("c", CancelToken()))]
    for count, thread in enumerate(threads, 1):
        thread.start()
        wait_for(turns, count)
    cancel.cancel()
    threads[0].join(5)
    turns.give_back(held)
    threads[1].join(5)
    assert ended == ["b Cancelled", "c served"]
    late = threading.Thread(target=wait, args=("d", CancelToken()))
    late.start()
    wait_for(turns, 1)
    turns.close()
    late.join(5)
    assert ended[-1] == "d WorkerError"


def test_a_cancel_in_the_thread_that_gives_turns_does_not_block() -> None:
    """Garbage collection may end a generator there, which cancels what it waits for."""
    turns, token = ClientTurns(1, patience_s=60), CancelToken()
    turns.take("a", CancelToken())

    def cancel() -> None:
        with turns._lock:
            token.cancel()

    def wait() -> None:
        with pytest.raises(Cancelled):
            turns.take("b", token)

    threads = [threading.Thread(target=wait, daemon=True), threading.Thread(target=cancel, daemon=True)]
    for thread in threads:
        thread.start()
        wait_for(turns, 1 if thread is threads[0] else 0)
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()


def test_a_turn_that_ends_wakes_one_of_many_threads() -> None:
    class Counted(ClientTurns):
        num_looks = 0

        def _is_due(self, turn: ClientTurn) -> bool:
            self.num_looks += 1
            return super()._is_due(turn)

    turns = Counted(1, patience_s=60)
    first = turns.take("a", CancelToken())

    def work() -> None:
        turns.give_back(turns.take("a", CancelToken()))

    with ThreadPoolExecutor(32) as pool:
        for _ in range(32):
            pool.submit(work)
        wait_for(turns, 32)
        turns.give_back(first)
    assert turns.num_looks < 6 * 32


def test_a_client_waits_a_second_for_anothers_long_tasks_and_the_worker_for_it_goes() -> None:
    pool = make(1)
    try:
        pool.run(("echo", 0), 30)
        cancel = CancelToken()
        with ThreadPoolExecutor(3) as threads:
            long = [threads.submit(pool.run, ("sleep", 20), 30, cancel, "a") for _ in range(3)]
            time.sleep(0.3)
            begun = time.monotonic()
            assert pool.run(("echo", 1), 30, None, "b") == 1
            assert 0.5 < time.monotonic() - begun < 5
            assert not any(future.done() for future in long)
            assert len(pool.pids()) == 1, "the second worker ended"
            cancel.cancel()
    finally:
        pool.close()


def test_one_client_has_no_more_workers_than_there_are() -> None:
    pool = make(1)
    try:
        with ThreadPoolExecutor(3) as threads:
            most = 0
            futures = [threads.submit(pool.run, ("sleep", 1.2), 30, None, "a") for _ in range(2)]
            while not all(future.done() for future in futures):
                most = max(most, len(pool.pids()))
                time.sleep(0.02)
        assert most == 1
    finally:
        pool.close()
