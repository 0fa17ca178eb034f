"""What the fronts of one server know of each other: their limits, and who is alive."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from beheld.api.front_place import FrontPlace
from beheld.server.admission import AdmissionControl
from beheld.server.errors import HttpError
from beheld.server.front_table import Column, FrontState, FrontTable, FrontWatch
from beheld.server.options import ServerOptions


def tables_of(folder: Path, count: int) -> list[FrontTable]:
    return [FrontTable(folder / "table", FrontPlace(number, count)) for number in range(count)]


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
    monkeypatch.setattr(time, "monotonic", lambda: now)
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
