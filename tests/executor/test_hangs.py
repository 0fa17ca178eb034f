"""A rank that hangs is found in bounded time, and no long prompt, compiler or pause is taken for one."""

from __future__ import annotations

import builtins
import importlib
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from beheld.executor import hangs, watchdog
from beheld.executor.hangs import Hangs, Patience, StepSize
from beheld.executor.progress import RankProgress, StepClock
from beheld.executor.wire import Beat
from beheld.runner import device_wait
from beheld.utils import unbounded_work

IDLE = Beat(7, 3, None, None, works=False)
WORKS = Beat(7, 3, None, None, works=True)
COMPILES = Beat(7, 3, None, None, works=True, unbounded=True)


def waits(seconds: float, entered: int = 8) -> Beat:
    """In a collective."""
    return Beat(entered, 3, seconds, None, works=False)


def device(seconds: float) -> Beat:
    """For its device."""
    return Beat(8, 3, None, seconds, works=False)


class Ranks:
    """Some ranks, on a clock of the test's own."""

    def __init__(
        self, count: int, *, synchronous: bool, lockstep: bool, equal: bool = True, factor: float = 1.0
    ) -> None:
        self.now = 1000.0
        self.ranks = [RankProgress(rank, entered_at=self.now, worked_at=self.now) for rank in range(count)]
        patience = Patience.of(synchronous=synchronous, lockstep=lockstep, equal=equal, factor=factor)
        self.hangs = Hangs(self.ranks[0], self.ranks[1:], patience, lockstep=lockstep)

    def say(self, *beats: Beat) -> None:
        """Take a beat of each rank."""
        for rank, beat in zip(self.ranks, beats, strict=True):
            rank.note(beat, self.now)

    def until_found(self, limit_s: float, *beats: Any) -> tuple[str | None, float]:
        """Say the same four times a second; return what is found, and after how many seconds.

        A function among the beats gives one for a number of seconds since the start.
        """
        began = self.now
        while self.now - began <= limit_s:
            self.say(*(beat(self.now - began) if callable(beat) else beat for beat in beats))
            if (found := self.hangs.found(self.now)) is not None:
                return found, self.now - began
            self.now += 0.25
        return None, limit_s


def test_on_cpus_a_rank_that_others_wait_for_is_found_soon() -> None:
    found, after_s = Ranks(3, synchronous=True, lockstep=True).until_found(60, waits, WORKS, waits)
    assert found == "Rank 1 is stuck in a step."
    assert after_s < 8


@pytest.mark.parametrize(("beat", "limit_s"), [(WORKS, 7), (COMPILES, 90)], ids=["works", "user"])
def test_on_cpus_all_others_may_wait_longer_for_a_first_rank_that_runs_what_users_write(
    beat: Beat, limit_s: int
) -> None:
    found, after_s = Ranks(3, synchronous=True, lockstep=True).until_found(200, beat, waits, waits)
    assert found == "Rank 0 is stuck in a step."
    assert limit_s < after_s < limit_s + 1


def test_on_cpus_all_others_may_wait_longer_for_a_rank_that_compiles() -> None:
    found, after_s = Ranks(3, synchronous=True, lockstep=True).until_found(200, waits, COMPILES, waits)
    assert found == "Rank 1 is stuck in a step."
    assert 90 < after_s < 91


def test_what_comes_after_a_compilation_has_its_own_time() -> None:
    ranks = Ranks(2, synchronous=True, lockstep=False)
    assert ranks.until_found(80, IDLE, COMPILES)[0] is None
    assert ranks.until_found(6, IDLE, WORKS)[0] is None
    assert ranks.until_found(3, IDLE, WORKS)[0] == "Rank 1 is stuck in a step."


def test_a_collective_that_all_ranks_are_in_and_none_leaves_is_found() -> None:
    """Nobody is late: what they send does not arrive."""
    found, after_s = Ranks(3, synchronous=True, lockstep=True).until_found(60, waits, waits, waits)
    assert found == "All ranks are in the same collective, which does not end."
    assert 7 < after_s < 8


def test_a_collective_of_many_positions_may_take_long() -> None:
    """At 5 ms for each: hosts with a slow network between them."""
    ranks = Ranks(2, synchronous=True, lockstep=True)
    ranks.hangs.launched(5, StepSize(8192))
    assert ranks.until_found(0.005 * 8192, waits, waits)[0] is None
    assert ranks.until_found(0.006 * 8192 + 7, lambda s: waits(s + 41), lambda s: waits(s + 41))[0] is not None


def test_ranks_that_are_in_one_collective_after_another_are_not_stuck() -> None:
    ranks = Ranks(2, synchronous=True, lockstep=True)
    many = lambda seconds: waits(5.0, entered=int(seconds))  # noqa: E731
    assert ranks.until_found(200, many, many)[0] is None


def test_ranks_that_were_stopped_amid_a_collective_are_not_stuck() -> None:
    """A machine that was stopped for an hour: their waits are as long, and they come out of it soon."""
    ranks = Ranks(2, synchronous=True, lockstep=True)
    ranks.say(waits(0), waits(0))
    ranks.now += 3600
    for each in ranks.ranks:
        each.excuse(ranks.now)
    assert ranks.until_found(5, waits(3600), waits(3600))[0] is None


@pytest.mark.parametrize(
    ("form", "beats", "usual_s"),
    [
        ({"synchronous": True, "lockstep": True}, (waits, WORKS), 7),
        ({"synchronous": True, "lockstep": True}, (waits, waits), 7),
        ({"synchronous": True, "lockstep": True}, (WORKS, waits), 7),
        ({"synchronous": True, "lockstep": True}, (COMPILES, waits), 90),
        ({"synchronous": True, "lockstep": False}, (waits, WORKS), 7),
        ({"synchronous": True, "lockstep": False}, (waits, COMPILES), 90),
        ({"synchronous": False, "lockstep": True}, (device, IDLE), 7),
        ({"synchronous": False, "lockstep": True}, (device, WORKS), 90),
        ({"synchronous": False, "lockstep": True}, (WORKS, IDLE), 90),
        ({"synchronous": True, "lockstep": True}, (COMPILES, IDLE), 600),
    ],
)
def test_a_factor_lengthens_every_limit(form: dict[str, bool], beats: tuple[Any, ...], usual_s: int) -> None:
    for factor in (1.0, 3.0):
        found, after_s = Ranks(2, factor=factor, **form).until_found(2000, *beats)
        assert found is not None
        assert factor * usual_s < after_s < factor * usual_s + 1.5


def test_a_factor_lengthens_what_is_added_for_positions() -> None:
    ranks = Ranks(2, synchronous=False, lockstep=True, factor=3.0)
    ranks.hangs.launched(5, StepSize(1000))
    assert 3 * 17 < ranks.until_found(100, device, IDLE)[1] < 3 * 17 + 1


def test_a_first_rank_that_runs_no_step_is_not_stuck() -> None:
    """An interrupted script leaves other ranks amid a step, and may go on an hour later."""
    for lockstep in (True, False):
        assert Ranks(2, synchronous=True, lockstep=lockstep).until_found(3600, IDLE, waits)[0] is None


def test_a_first_rank_that_goes_on_after_a_pause_is_not_stuck() -> None:
    """Others' waits are as long as the pause then; only what comes after it counts."""
    goes_on = lambda seconds: Beat(7, int(seconds), None, None, works=True)  # noqa: E731
    for lockstep, limit_s in ((True, 7), (False, 90)):
        ranks = Ranks(3, synchronous=True, lockstep=lockstep)
        assert ranks.until_found(3600, IDLE, IDLE, waits)[0] is None
        paused = lambda seconds: waits(3600 + seconds)  # noqa: E731
        assert ranks.until_found(limit_s - 1, goes_on, IDLE, paused)[0] is None
        assert ranks.until_found(3, goes_on, WORKS, paused)[0] == "Rank 1 is stuck in a step."


def test_ranks_with_items_or_experts_of_their_own_may_take_longer_than_others() -> None:
    """As long as they begin one layer after another."""
    layers = lambda seconds: Beat(7, 3, None, None, works=True, layers=int(seconds / 5))  # noqa: E731
    ranks = Ranks(2, synchronous=True, lockstep=True, equal=False)
    assert ranks.until_found(80, waits, layers)[0] is None
    found, after_s = Ranks(2, synchronous=True, lockstep=True, equal=False).until_found(200, waits, WORKS)
    assert found == "Rank 1 is stuck in a step."
    assert 7 < after_s < 8


def test_of_stages_the_one_that_no_other_keeps_waiting_is_named() -> None:
    """Rank 2 computes the first stage; the other two wait for it, one after the other."""
    found, after_s = Ranks(3, synchronous=True, lockstep=False).until_found(200, waits, waits, WORKS)
    assert found == "Rank 2 is stuck in a step."
    assert 7 < after_s < 8


def test_a_stage_may_take_long_for_a_long_prompt() -> None:
    """4,096 positions of a large model on a slow CPU."""
    ranks = Ranks(2, synchronous=True, lockstep=False)
    ranks.hangs.count(5120)
    ranks.hangs.launched(5, StepSize(4096))
    layers = lambda seconds: Beat(7, 3, None, None, works=True, layers=int(seconds / 800))  # noqa: E731
    assert ranks.until_found(4000, waits, layers)[0] is None


@pytest.mark.parametrize(("hidden_size", "position_s"), [(64, 0.02), (896, 0.032), (3584, 0.2), (16_384, 0.2)])
def test_a_layer_has_time_for_each_position_by_its_size(hidden_size: int, position_s: float) -> None:
    for positions, factor in ((8, 1.0), (2048, 1.0), (2048, 3.0)):
        ranks = Ranks(2, synchronous=True, lockstep=False, factor=factor)
        ranks.hangs.count(hidden_size)
        ranks.hangs.launched(5, StepSize(positions))
        found, after_s = ranks.until_found(4000, IDLE, WORKS)
        assert found == "Rank 1 is stuck in a step."
        expected_s = factor * (7 + position_s * positions)
        assert 0.99 * expected_s < after_s < 1.02 * expected_s + 1


def test_a_layer_has_a_second_for_each_embedding() -> None:
    """An item's pixels may be many times as many as its embeddings."""
    ranks = Ranks(2, synchronous=True, lockstep=False)
    ranks.hangs.count(64)
    ranks.hangs.launched(5, StepSize(10, 100))
    found, after_s = ranks.until_found(400, IDLE, WORKS)
    assert found == "Rank 1 is stuck in a step."
    assert 107 < after_s < 108.5


def test_a_layer_has_time_for_what_its_positions_attend_to() -> None:
    """2,048 positions behind 200,000, of 3,584 numbers: 1.5 thousand billion products and sums, and half a minute of
    weights."""
    ranks = Ranks(2, synchronous=True, lockstep=False)
    ranks.hangs.count(3584)
    ranks.hangs.launched(5, StepSize(2048, 0, 2048 * 202_048))
    assert ranks.until_found(2 * 200, IDLE, WORKS)[0] is None
    assert ranks.until_found(2000, IDLE, WORKS)[0] == "Rank 1 is stuck in a step."


def test_a_rank_may_be_in_the_last_layer_of_a_step_that_the_first_one_has_finished() -> None:
    """What is known of it is a second old, and a layer of a long prompt may take longer than 7 s."""
    ranks = Ranks(2, synchronous=True, lockstep=True)
    ranks.hangs.count(3584)
    ranks.hangs.launched(5, StepSize(2048))
    assert ranks.until_found(60, WORKS, WORKS)[0] is None
    ranks.hangs.finished(5, ranks.now)
    assert ranks.until_found(60, IDLE, WORKS)[0] is None
    ranks.say(IDLE, IDLE)
    assert ranks.hangs.found(ranks.now) is None
    # The step after it has its own time alone.
    ranks.now += 1
    ranks.hangs.launched(6, StepSize(1))
    assert ranks.until_found(60, IDLE, Beat(7, 4, None, None, works=True))[1] < 9


def test_devices_that_stand_still_while_requests_decode_are_found_soon() -> None:
    ranks = Ranks(2, synchronous=False, lockstep=True)
    ranks.hangs.launched(5, StepSize(64))
    ranks.hangs.launched(6, StepSize(64))
    found, after_s = ranks.until_found(60, device, IDLE)
    assert found is not None
    assert found.startswith("The devices have not finished a step")
    assert 7 < after_s < 10


@pytest.mark.parametrize("positions", [8192, 131_072])
def test_devices_may_compute_a_long_prompt(positions: int) -> None:
    """At 5 ms a position, which is slow."""
    ranks = Ranks(2, synchronous=False, lockstep=True)
    ranks.hangs.launched(5, StepSize(positions))
    assert ranks.until_found(0.005 * positions, device, IDLE)[0] is None
    assert ranks.until_found(0.006 * positions + 10, lambda s: device(0.005 * positions + s), IDLE)[0] is not None


def test_a_finished_step_gives_the_next_one_no_time() -> None:
    ranks = Ranks(2, synchronous=False, lockstep=True)
    ranks.hangs.launched(5, StepSize(131_072))
    ranks.hangs.launched(6, StepSize(1))
    ranks.hangs.finished(5, ranks.now)
    assert ranks.until_found(60, device, IDLE)[1] < 8


def test_steps_that_give_nothing_are_forgotten_in_time() -> None:
    """Nobody waits for the device after a piece of a prompt, so it is never known to be finished."""
    ranks = Ranks(2, synchronous=False, lockstep=True)
    for step in range(1000):
        ranks.hangs.launched(step, StepSize(10))
    assert ranks.until_found(60, device, IDLE)[1] < 7 + 0.01 * 10 * 16 + 1


def test_a_host_that_compiles_while_the_devices_of_others_wait_has_time() -> None:
    ranks = Ranks(3, synchronous=False, lockstep=True)
    assert ranks.until_found(80, device, IDLE, WORKS)[0] is None
    # It is done, and the devices have had all for a moment.
    assert ranks.until_found(5, lambda s: device(80 + s), IDLE, IDLE)[0] is None


def test_a_host_that_never_launches_what_others_wait_for_is_named() -> None:
    found, after_s = Ranks(3, synchronous=False, lockstep=True).until_found(200, device, IDLE, WORKS)
    assert found == "Rank 2 is stuck in a step."
    assert 90 < after_s < 91


def test_a_host_may_begin_step_after_step_without_a_collective() -> None:
    """As graphs are launched."""
    ranks = Ranks(2, synchronous=False, lockstep=True)

    def steps(seconds: float) -> Beat:
        return Beat(7, int(100 * seconds), None, None, works=True)

    assert ranks.until_found(2000, steps, steps)[0] is None


@pytest.mark.parametrize(
    ("beat", "synchronous", "limit_s"),
    [(WORKS, True, 7), (WORKS, False, 90), (COMPILES, True, 600), (COMPILES, False, 600)],
)
@pytest.mark.parametrize("which", [0, 1])
def test_a_host_that_does_not_come_back_from_a_step_is_found_in_the_end(
    which: int, beat: Beat, synchronous: bool, limit_s: int
) -> None:
    beats = [IDLE, IDLE]
    beats[which] = beat
    found, after_s = Ranks(2, synchronous=synchronous, lockstep=True).until_found(700, *beats)
    assert found == f"Rank {which} is stuck in a step."
    assert limit_s < after_s < limit_s + 1


def test_what_nobody_heard_counts_from_when_somebody_listens() -> None:
    """A machine that was stopped and goes on."""
    ranks = Ranks(2, synchronous=False, lockstep=True)
    ranks.say(device(1), WORKS)
    ranks.now += 3600
    for each in ranks.ranks:
        each.excuse(ranks.now)
    ranks.say(device(3601), WORKS)
    assert ranks.hangs.found(ranks.now) is None
    ranks.now += 1
    ranks.say(device(3602), IDLE)
    assert ranks.hangs.found(ranks.now) is None


def test_a_clock_tells_what_the_thread_of_steps_is_at() -> None:
    group = SimpleNamespace(entered=4, waits_since=None)
    clock, may, at = StepClock(group), threading.Semaphore(0), threading.Semaphore(0)

    def run() -> None:
        with clock.step():
            at.release()
            may.acquire()
            with device_wait.waiting():
                at.release()
                may.acquire()
            group.waits_since = time.monotonic()
            at.release()
            may.acquire()
            group.waits_since = None
        at.release()

    found = [clock.beat()]
    thread = threading.Thread(target=run)
    thread.start()
    for _ in range(4):
        at.acquire()
        found.append(clock.beat())
        may.release()
    thread.join()
    assert [(beat.steps, beat.waits_s is None, beat.device_s is None, beat.works) for beat in found] == [
        (0, True, True, False), (1, True, True, True), (1, True, False, False), (1, False, True, False),
        (1, True, True, False),
    ]  # fmt: skip


def test_a_clock_counts_layers_and_knows_what_may_take_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = SimpleNamespace(entered=0, waits_since=None)
    clock = StepClock(group)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    clock.count(model[::2])
    assert clock.beat().layers == 0
    model(torch.zeros(1, 8))
    assert clock.beat().layers == 2
    seen: list[Beat] = []

    def backend(graph: Any, inputs: Any) -> Any:
        # The compiler is at work here.
        seen.append(clock.beat())
        return graph.forward

    def eager(x: torch.Tensor) -> torch.Tensor:
        seen.append(clock.beat())
        return x

    with clock.step():
        compiled = torch.compile(lambda x: torch.relu(x) + 1, backend=backend)
        compiled(torch.zeros(5))
        compiled(torch.zeros(5))
        model[0].register_forward_hook(lambda module, given, out: eager(out))
        model(torch.zeros(1, 8))
        with unbounded_work.running():
            seen.append(clock.beat())
        (tmp_path / "seen_at_import.py").write_text("look()\n")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(builtins, "look", lambda: seen.append(clock.beat()), raising=False)
        importlib.import_module("seen_at_import")
    with clock.step(unbounded=True):
        seen.append(clock.beat())
    seen.append(clock.beat())
    assert [(beat.works, beat.unbounded) for beat in seen] == [
        (True, True), (True, False), (True, True), (True, True), (True, True), (False, False),
    ]  # fmt: skip


def test_limits_are_as_the_page_says() -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "several-gpus.md").read_text(encoding="utf-8")
    section = page.partition("## When something fails")[2].partition("\n## ")[0]
    for words in (
        f"for {hangs.STUCK_S:.0f} s",
        f"{hangs.COMPILING_S:.0f} s",
        f"{hangs.DEVICE_S:.0f} s",
        f"{1000 * hangs.POSITION_S:.0f} ms",
        f"{hangs.HOST_POSITION_S:.0f} s for each",
        f"{hangs.LAYER_POSITION_S} to {hangs.MOST_LAYER_POSITION_S} s for each",
        f"{hangs.WORKING_S / 60:.0f} minutes",
        f"{watchdog.SILENT_S:.0f} s",
    ):
        assert words in section, words
