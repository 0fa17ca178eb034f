"""What the fronts of one server know of each other: their limits, and who is alive."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from beheld.api.front_place import FrontPlace
from beheld.cli import fronts
from beheld.cli.fronts import Fronts
from beheld.core.config import EngineArgs
from beheld.core.errors import ConfigError
from beheld.server import front_table
from beheld.server.admission import AdmissionControl
from beheld.server.errors import HttpError
from beheld.server.front_table import Column, FrontState, FrontTable, FrontWatch, make_table
from beheld.server.neighbours import Forwarding, Neighbours
from beheld.server.options import ServerOptions
from tests.own_clock import set_clock


def tables_of(folder: Path, count: int) -> list[FrontTable]:
    with open(make_table(str(folder), count), "rb+") as file:
        return [FrontTable(file.fileno(), FrontPlace(number, count)) for number in range(count)]


def refused(control: AdmissionControl, answers: int = 1, client: str = "") -> bool:
    try:
        control.check(answers, client)
    except HttpError as error:
        return error.status == 503
    return False


def test_shares_of_a_limit_are_together_the_limit() -> None:
    for total, count in ((256, 3), (10, 4), (7, 2), (0, 3)):
        assert sum(FrontPlace(number, count).share(total) for number in range(count)) == total
    # None can do without a preparing process.
    assert [FrontPlace(number, 4).share(2) for number in range(4)] == [1, 1, 1, 1]


def test_answers_are_counted_over_all_fronts(tmp_path: Path) -> None:
    options = ServerOptions(max_requests=32)
    one, two, three, four = controls = [AdmissionControl(options, table) for table in tables_of(tmp_path, 4)]
    with one.admitted(20, "greedy"), three.admitted(12, "greedy"):
        assert all(refused(each) for each in controls)
        assert refused(one, 1, "greedy")
        assert refused(three, 1, "greedy")
        assert [each.busy for each in controls] == [20, 0, 12, 0]
        # Who has few may have some more: at all fronts together a sixteenth, rounded up at each.
        assert not refused(two, 1, "other")
        assert refused(two, 2, "other")
        with two.admitted(1, "a"), four.admitted(1, "b"), one.admitted(1, "c"):
            assert not refused(four, 1, "d")
    # One front alone may have all of them; a share would be 8.
    with four.admitted(32):
        assert refused(one)
        assert refused(four)
    assert not refused(one, 32)


def test_bodies_are_counted_over_all_fronts(tmp_path: Path) -> None:
    options = ServerOptions(max_body_bytes=1 << 20, max_reading_bytes=4 << 20)
    one, two = (AdmissionControl(options, table) for table in tables_of(tmp_path, 2))
    one.take(3 << 20, "")
    with pytest.raises(HttpError):
        two.take((1 << 20) + 1, "")
    two.take(1 << 20, "")
    one.give(3 << 20, "")
    # A client has three fourths over all fronts.
    with pytest.raises(HttpError, match="of yours"):
        one.take((3 << 19) + 1, "a")
    one.take(3 << 19, "a")


def test_what_a_dead_front_had_is_free(tmp_path: Path) -> None:
    tables = tables_of(tmp_path, 2)
    one, two = (AdmissionControl(ServerOptions(max_requests=4), table) for table in tables)
    with two.admitted(4):
        assert refused(one)
        tables[0].reset(1, 1)
        assert not refused(one)
        assert tables[0].column(Column.RESTARTS) == [0, 1]


@pytest.mark.case(133)
def test_a_front_without_beats_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    set_clock(monkeypatch, lambda: now, front_table, fronts)
    one, two = tables_of(tmp_path, 2)
    watch = FrontWatch(one)

    def wait(seconds: float, *alive: FrontTable) -> None:
        nonlocal now
        for _ in range(round(seconds / 0.25)):
            now += 0.25
            for table in alive:
                table.beat()
            watch.look()

    wait(10)
    assert [watch.state(number) for number in (0, 1)] == [FrontState.STARTING] * 2
    wait(1, one, two)
    assert [watch.state(number) for number in (0, 1)] == [FrontState.SERVING] * 2
    wait(2, one)
    assert watch.state(1) is FrontState.SERVING
    wait(0.5, one)
    assert [watch.state(number) for number in (0, 1)] == [FrontState.SERVING, FrontState.SILENT]
    wait(0.25, one, two)
    assert watch.state(1) is FrontState.SERVING
    # This process stood still: it does not know what the others did.
    now += 3600
    watch.look()
    assert watch.silence_s(1) == 0.5
    # One that is ready, and then does not serve.
    one.reset(1, 1)
    wait(10, one)
    assert watch.state(1) is FrontState.STARTING
    one.expect(1)
    wait(0.25, one)
    assert watch.state(1) is FrontState.STARTING
    wait(9, one)
    assert watch.state(1) is FrontState.SILENT
    assert watch.silence_s(1) > 8
    assert [each["state"] for each in watch.reports()] == ["serving", "silent"]


def test_a_table_is_memory_and_without_that_a_file_with_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open(make_table(str(tmp_path), 3), "rb"):
        assert not list(tmp_path.iterdir())
    monkeypatch.delattr(os, "memfd_create")
    with open(make_table(str(tmp_path), 3), "rb+") as file:
        assert FrontTable(file.fileno(), FrontPlace(1, 3)).column(Column.BEATS) == [0, 0, 0]
        assert os.fstat(file.fileno()).st_blocks


def test_without_room_for_the_table_a_server_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(Fronts, "_begun", lambda *_: pytest.fail("a front was started"))
    with socket.socket() as listener, pytest.raises(ConfigError, match="No space left"):
        Fronts(2, EngineArgs(model="any"), ServerOptions(), listener)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("beats", "until_s"), [(1, 300.0), (2, 8.0)], ids=["starting", "serving"])
def test_a_front_that_starts_has_longer_than_one_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beats: int, until_s: float
) -> None:
    now = 100.0
    one, two = tables_of(tmp_path, 2)
    set_clock(monkeypatch, lambda: now, front_table, fronts)
    killed: list[float] = []

    class Ending(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            nonlocal now
            now += timeout or 0.0
            return bool(killed)

    watched = Fronts.__new__(Fronts)
    watched._table, watched._ending, watched._options = one, Ending(), ServerOptions(health_s=8.0)
    watched._engine = SimpleNamespace(alive=True)  # type: ignore[assignment]
    process = SimpleNamespace(poll=lambda: None, kill=lambda: killed.append(now))
    watched._fronts = {1: SimpleNamespace(spawned=SimpleNamespace(process=process), restarts=0)}  # type: ignore[dict-item]
    for _ in range(beats):
        two.beat()
    watched._watch()
    assert killed[0] - 100 == pytest.approx(until_s, abs=1.0)
    assert fronts._START_S == 300


def test_what_a_front_had_counted_stays_when_it_is_started_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = tables_of(tmp_path, 2)
    answer: bytes | None = b"5"

    async def ask(self: Forwarding, number: int, path: str) -> bytes | None:
        return answer

    def counted(texts: Sequence[bytes]) -> bytes:
        return b"kept %d" % sum(int(text.split()[-1]) for text in texts if text)

    monkeypatch.setattr(Forwarding, "_ask", ask)
    nothing: Any = None
    asking = Forwarding(
        nothing,
        Neighbours(FrontPlace(0, 2)),
        (),
        nothing,
        nothing,
        {},
        refuses=nothing,
        hangs=nothing,
        restarts=lambda: one.column(Column.RESTARTS),
        counted=counted,
        orders={},
    )

    def told() -> tuple[list[bytes], int]:
        figures = asyncio.run(asking.ask_others("/metrics"))
        return list(figures.texts), figures.num_new

    assert told() == ([b"5"], 2)
    answer = None
    assert told() == ([b"5"], 1)
    one.reset(1, 1)
    assert told() == ([b"kept 5"], 1)
    answer = b"2"
    assert told() == told() == ([b"2", b"kept 5"], 2)
    one.reset(1, 3)
    answer = b"1"
    assert told() == ([b"1", b"kept 7"], 2)
