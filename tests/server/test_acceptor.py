"""Several processes accept from one socket: each leaves connections to those that have fewer, but not for long."""

from __future__ import annotations

import asyncio
import socket
import struct
from pathlib import Path

import pytest

from beheld.api.front_place import FrontPlace
from beheld.server import acceptor
from beheld.server.acceptor import Acceptor, ConnectionCounts, CountedPlaces, Uncounted
from beheld.server.clients import Clients
from beheld.server.front_table import FrontTable, make_table
from beheld.server.options import ServerOptions


def tables_of(folder: Path, count: int) -> list[FrontTable]:
    with open(make_table(str(folder), count), "rb+") as file:
        return [FrontTable(file.fileno(), FrontPlace(number, count)) for number in range(count)]


def test_a_front_knows_whether_others_have_fewer(tmp_path: Path) -> None:
    tables = tables_of(tmp_path, 3)
    one, two, three = map(ConnectionCounts, tables)
    one.begin()
    # They count for 7: the first front passes on what the others send.
    one.set(4)
    # The others do not accept yet.
    assert not one.others_have_fewer()
    two.begin()
    places = CountedPlaces(8, two, tables[1])
    places.take("a", 2)
    assert one.others_have_fewer()
    assert not two.others_have_fewer()
    places.take("b")
    # A few more are no reason to wait.
    assert not one.others_have_fewer()
    places.give("a")
    assert one.others_have_fewer()
    two.come(1)
    assert not one.others_have_fewer()
    two.come(-1)
    three.begin()
    assert not two.others_have_fewer()
    places.take("c", 4)
    assert two.others_have_fewer()
    three.leave()
    assert not two.others_have_fewer()
    places.take("c", 8)
    assert two.others_have_fewer()
    # The first one hangs, and then goes on.
    tables[0].leave(0)
    assert not two.others_have_fewer()
    one.tell()
    assert two.others_have_fewer()
    one.leave()
    one.set(4)
    assert not two.others_have_fewer()


@pytest.fixture
def listener() -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    made.bind(("127.0.0.1", 0))
    made.listen(4096)
    return made


def accepted(listener: socket.socket, tables: list[FrontTable], taken: list[int], number: int) -> list[int]:
    """How many of `number` connections each front accepts; those that have no acceptor are busy."""
    found = [0] * len(taken)
    counts = [ConnectionCounts(table) for table in tables]

    async def run() -> None:
        acceptors, links = [], []
        for place, start in enumerate(taken):
            places = CountedPlaces(1000, counts[place], tables[place])

            async def connect(made: socket.socket, place: int = place, places: CountedPlaces = places) -> None:
                found[place] += 1
                places.take("x")
                links.append(made)

            if start < 0:
                counts[place].begin()
                continue
            # One event loop watches a descriptor once.
            acceptors.append(Acceptor(listener.dup(), connect, counts[place]))
            places.take("x", start)
        for _ in range(number):
            links.append(await asyncio.to_thread(socket.create_connection, listener.getsockname(), 5))
        deadline = asyncio.get_running_loop().time() + 5
        while sum(found) < number:
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.001)
        for each in acceptors:
            each.close()
        for link in links:
            link.close()

    asyncio.run(run())
    return found


def test_the_first_front_keeps_the_numbers_of_fronts_that_serve_before_it(tmp_path: Path) -> None:
    """By the time it serves, they may have connections already."""
    with open(make_table(str(tmp_path), 2), "rb+") as file:
        other = ConnectionCounts(FrontTable(file.fileno(), FrontPlace(1, 2)))
        other.begin()
        first = ConnectionCounts(FrontTable(file.fileno(), FrontPlace(0, 2)))
    first.begin()
    first.set(10)
    assert first.others_have_fewer()


def test_connections_go_to_the_front_with_the_fewest(listener: socket.socket, tmp_path: Path) -> None:
    with listener:
        taken = [20, 0, 10]
        found = accepted(listener, tables_of(tmp_path, 3), taken, 45)
        totals = [own + more for own, more in zip(taken, found, strict=True)]
        # The first has what is enough for it already; it takes what the others leave for too long.
        assert found[0] <= 3
        assert abs(totals[1] - totals[2]) <= 8


def test_a_busy_front_keeps_no_connection_waiting(listener: socket.socket, tmp_path: Path) -> None:
    with listener:
        assert accepted(listener, tables_of(tmp_path, 2), [9, -1], 6) == [6, 0]


@pytest.mark.case(140)
def test_clients_begin_by_turns_and_those_that_have_left_do_not_begin(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand connections a second that were cut off at once held /health for up to 644 ms."""
    begun: list[str] = []
    turns: list[int] = []

    async def run() -> None:
        now, made = 0, []

        async def connect(accepted: socket.socket) -> None:
            # One that has left has no name.
            turns.append(now)
            made.append(accepted)
            begun.append(accepted.getpeername()[0])

        monkeypatch.setattr(acceptor, "_BEGUN_IN_TURN", 2)
        links = [socket.create_connection(listener.getsockname(), 5) for _ in range(20)]
        for place, link in enumerate(links[8:14]):
            if place % 2:
                # With something unread.
                link.sendall(b"x")
            link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            link.close()
        other = socket.create_connection(listener.getsockname(), 5, source_address=("127.0.0.2", 0))
        accepting = Acceptor(listener, connect, Uncounted(), lambda address: address)
        while len(begun) < 15:
            now += 1
            assert now < 1000
            await asyncio.sleep(0)
        accepting.close()
        for link in (*links, *made, other):
            link.close()

    with listener:
        asyncio.run(run())
    assert begun.index("127.0.0.2") <= 2
    assert max(turns.count(turn) for turn in turns) == 2
    assert len(begun) == len(turns) == 15


@pytest.mark.case(140)
def test_no_client_keeps_more_connections_waiting_than_it_may(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []

    async def run() -> None:
        made = []

        async def connect(accepted: socket.socket) -> None:
            begun.append(accepted.getpeername()[0])
            made.append(accepted)

        monkeypatch.setattr(acceptor, "_MOST_WAITING", 5)
        links = [socket.create_connection(listener.getsockname(), 5) for _ in range(20)]
        other = socket.create_connection(listener.getsockname(), 5, source_address=("127.0.0.2", 0))
        accepting = Acceptor(listener, connect, Uncounted(), lambda address: address)
        for _ in range(100):
            await asyncio.sleep(0)
        accepting.close()
        for link in (*links, *made, other):
            link.close()

    with listener:
        asyncio.run(run())
    assert sorted(begun) == ["127.0.0.1"] * 5 + ["127.0.0.2"]


@pytest.mark.case(141)
def test_a_client_with_many_requests_in_turns_begins_no_further_connections(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four thousand of its connections were kept, whose objects each collection of the garbage went through."""
    begun: list[str] = []
    monkeypatch.setattr(acceptor, "_MOST_QUEUED", 3)
    queued = 3

    async def run() -> list[str]:
        nonlocal queued
        made = []

        async def connect(accepted: socket.socket) -> None:
            begun.append(accepted.getpeername()[0])
            made.append(accepted)

        links = [socket.create_connection(listener.getsockname(), 5) for _ in range(20)]
        other = socket.create_connection(listener.getsockname(), 5, source_address=("127.0.0.2", 0))
        accepting = Acceptor(
            listener, connect, Uncounted(), lambda address: address, lambda peer: queued * (peer == "127.0.0.1")
        )
        await asyncio.sleep(0.05)
        first = list(begun)
        queued = 2
        while len(begun) < 21:
            await asyncio.sleep(0.001)
        accepting.close()
        for link in (*links, *made, other):
            link.close()
        return first

    with listener:
        first = asyncio.run(asyncio.wait_for(run(), 10))
    # The others' begin meanwhile, and its own when fewer are queued.
    assert first == ["127.0.0.2"]
    assert sorted(begun) == ["127.0.0.1"] * 20 + ["127.0.0.2"]


@pytest.mark.case(141)
def test_clients_without_names_begin_however_many_requests_are_in_turns(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be anyone's."""
    monkeypatch.setattr(acceptor, "_MOST_QUEUED", 3)

    async def run() -> None:
        begun = asyncio.Event()

        async def connect(accepted: socket.socket) -> None:
            accepted.close()
            begun.set()

        with socket.create_connection(listener.getsockname(), 5):
            accepting = Acceptor(listener, connect, Uncounted(), lambda address: "", lambda peer: 9)
            await asyncio.wait_for(begun.wait(), 5)
            accepting.close()

    with listener:
        asyncio.run(run())


def test_fronts_name_clients_alike() -> None:
    """Otherwise a client would have a turn at the engine for each front that it meets."""
    scope = {"client": ("10.0.0.1", 5), "state": {}, "headers": []}
    one, two, other = (Clients(ServerOptions(), secret=secret) for secret in (b"a", b"a", b""))
    assert one.of(scope) == two.of(scope) != other.of(scope)
