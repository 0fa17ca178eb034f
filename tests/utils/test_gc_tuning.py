"""What a start leaves to the garbage collector, and what compiling does."""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import beheld
from beheld.models.surgery.compiled import compile_layers
from beheld.models.surgery.operation import Changes
from beheld.utils import gc_tuning
from beheld.utils.bounded_json import JsonBounds, parse
from beheld.utils.gc_tuning import (
    collect_if_due,
    collecting,
    paused_collector,
    seldom_collected,
    set_aside,
    uncollected,
)
from tests.own_clock import set_clock


@pytest.fixture(autouse=True)
def _enabled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    assert gc.isenabled(), "these tests begin with a collector that works"
    # What the run of all tests set aside.
    gc.unfreeze()
    monkeypatch.setattr(gc_tuning, "_program_froze", False)
    yield
    gc.freeze()
    gc.enable()


class _Made:
    """What a start leaves behind."""

    itself: Any


def _in(generation: int, made: object) -> bool:
    return any(thing is made for thing in gc.get_objects(generation=generation))


def test_what_was_made_meanwhile_is_old() -> None:
    with paused_collector():
        assert not gc.isenabled()
        made = _Made()
        made.itself = made
    assert gc.isenabled()
    assert _in(2, made), "the next collections of young objects would walk through it"
    assert gc.get_freeze_count() == 0, "it would never be freed"


def test_a_first_import_pauses_collection_and_later_uses_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    whole = importlib.import_module

    def watched(name: str) -> Any:
        seen.append(gc.isenabled())
        return whole(name)

    monkeypatch.setattr(importlib, "import_module", watched)
    # A module of Python's own in place of one of ours, whose classes others have.
    monkeypatch.setitem(beheld._HOMES, "rgb_to_hsv", "colorsys")
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    assert beheld.rgb_to_hsv(0, 0, 0) == (0.0, 0.0, 0)
    assert seen[0] is False
    seen.clear()
    made = _Made()
    assert beheld.rgb_to_hsv(0, 0, 0) == (0.0, 0.0, 0)
    assert all(seen)
    assert _in(0, made), "a use of a name made all objects old"


def test_what_a_program_set_aside_stays_there() -> None:
    made = _Made()
    gc.freeze()
    with paused_collector():
        pass
    assert not any(_in(generation, made) for generation in range(3))


def test_what_a_program_set_aside_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The count walks through all of it."""
    counted: list[int] = []
    count = gc.get_freeze_count
    monkeypatch.setattr(gc, "get_freeze_count", lambda: counted.append(count()) or counted[-1])
    for _ in range(2):
        with paused_collector():
            pass
    gc.freeze()
    for _ in range(3):
        with paused_collector():
            pass
    assert counted[:2] == [0, 0], "until then it is asked each time"
    assert len(counted) == 3
    assert counted[2] > 0


def test_the_compiler_finds_nothing_young_but_its_own() -> None:
    """It collects the two younger generations after each layer."""
    gc.disable()
    made = _Made()
    assert _in(0, made)
    compile_layers([], Changes())
    assert _in(2, made)


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    with paused_collector():
        assert not gc.isenabled()
    assert not gc.isenabled()


def test_an_error_turns_it_on_again() -> None:
    with pytest.raises(RuntimeError), paused_collector():
        raise RuntimeError
    assert gc.isenabled()


def test_set_aside_until_the_process_ends() -> None:
    """Objects in cycles are then collected as ever, or modules would complain of them."""
    program = """
        import gc
        from beheld.utils.gc_tuning import set_aside

        class Made:
            def __del__(self):
                print("collected")

        made = Made()
        made.itself = made
        set_aside()
        del made
        gc.collect()
        print("set aside", gc.get_freeze_count() > 0)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["set aside True", "collected"]


def test_set_aside_is_out_of_every_generation() -> None:
    made = _Made()
    set_aside()
    assert not any(_in(generation, made) for generation in range(3))


@pytest.fixture
def collections() -> Iterator[list[int]]:
    """The generations of collections that begin."""
    seen: list[int] = []

    def collected(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            seen.append(info["generation"])

    gc.callbacks.append(collected)
    yield seen
    gc.callbacks.remove(collected)


@pytest.mark.case(129)
def test_no_body_starts_a_collection_while_it_is_parsed(collections: list[int]) -> None:
    """A collection of all objects kept the interpreter for 60 to 90 ms while other clients' long lists were in work."""
    body = json.dumps({f"k{number}": 1 for number in range(20_000)})
    parse(body, JsonBounds())
    assert collections, "by itself it starts some"
    collections.clear()
    with uncollected():
        parse(body, JsonBounds())
        assert not collections
    assert gc.isenabled()


def test_collections_begin_again_when_the_first_of_several_such_blocks_ends() -> None:
    first = uncollected()
    first.__enter__()
    with uncollected():
        assert not gc.isenabled()
        first.__exit__(None, None, None)
        assert gc.isenabled(), "blocks that follow one another closely would keep it off for good"
    assert gc.isenabled()


def test_a_collector_that_is_off_stays_off_in_such_a_block() -> None:
    gc.disable()
    with uncollected():
        pass
    assert not gc.isenabled()


@pytest.mark.parametrize("call", ["disable", "enable"])
def test_an_interrupt_while_it_is_switched_turns_it_on_again(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    switch = getattr(gc, call)

    def interrupted() -> None:
        switch()
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(gc, call, interrupted)
        with pytest.raises(KeyboardInterrupt), uncollected():
            assert call == "enable", "the interrupt comes before the block"
    assert gc.isenabled()
    with uncollected():
        assert not gc.isenabled(), "the lock was lost"


def test_a_collection_begins_seldom_while_items_are_taken(
    collections: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = 0.0
    set_clock(monkeypatch, lambda: seconds, gc_tuning)
    kept: list[list[int]] = []
    found: list[int] = []
    for number in seldom_collected(iter(range(40))):
        found.append(number)
        kept += [[number] for _ in range(1000)]
        seconds += 0.02
    # 40,000 lists by themselves start some fifty.
    assert found == list(range(40))
    assert 1 <= len(collections) <= 4
    assert gc.isenabled()


def test_collections_go_on_after_an_item_that_fails() -> None:
    def failing() -> Iterator[int]:
        yield 1
        assert not gc.isenabled()
        raise RuntimeError

    with pytest.raises(RuntimeError):
        list(seldom_collected(failing()))
    assert gc.isenabled()
    for _ in seldom_collected(range(3)):
        break
    assert gc.isenabled()


def test_a_wait_inside_such_a_block_collects() -> None:
    with collecting():
        assert gc.isenabled()
    with uncollected():
        with collecting():
            assert gc.isenabled()
        assert not gc.isenabled()

        def elsewhere() -> None:
            with collecting():
                found.append(gc.isenabled())

        found: list[bool] = []
        other = threading.Thread(target=elsewhere)
        other.start()
        other.join()
        assert found == [False], "the block of this thread is another's"
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    with uncollected(), collecting():
        assert not gc.isenabled(), "the program turned it off"


def test_collections_begin_before_an_item_that_takes_long(
    collections: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = 0.0
    set_clock(monkeypatch, lambda: seconds, gc_tuning)

    def items() -> Iterator[int]:
        nonlocal seconds
        yield 0
        kept = []
        for _ in range(40):
            collect_if_due()
            kept += [[0] for _ in range(1000)]
            seconds += 0.02
        yield 1

    before = 0
    for number in seldom_collected(items()):
        if number == 0:
            before = len(collections)
    assert 2 <= len(collections) - before <= 5
    assert gc.isenabled()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes cannot be forked")
def test_a_process_that_is_forked_meanwhile_collects() -> None:
    script = """
import gc, os, threading
from beheld.utils.gc_tuning import uncollected

def forked():
    child = os.fork()
    if child == 0:
        on = gc.isenabled()
        with uncollected():
            off = not gc.isenabled()
        os._exit(0 if on and gc.isenabled() and (off or own) else 7)
    found.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

found = []
for own in (False, True):
    with uncollected():
        if own:
            forked()
        else:
            thread = threading.Thread(target=forked)
            thread.start()
            thread.join()
        assert not gc.isenabled()
    assert gc.isenabled()
print(found)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[0, 0]", done.stderr
