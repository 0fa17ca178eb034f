"""How files of tests are shared out to processes that run side by side."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.conftest import ALONE, LASTING, NICE, TIMED, WAITING, first_of, next_scope, pytest_configure

ROOT = Path(__file__).parents[1]


def test_the_folders_and_the_files_are_there() -> None:
    assert all((ROOT / path).exists() for path in WAITING + TIMED)
    assert all((ROOT / file).is_file() for file in (*LASTING, ALONE))
    # pytest knows the mark by its name alone; this file speaks of it, too.
    marked = [path for path in ROOT.glob("tests/**/test_*.py") if "pytest.mark.alone" in path.read_text("utf-8")]
    assert [str(path.relative_to(ROOT)) for path in marked if path != Path(__file__)] == [ALONE]


def test_the_first_process_takes_what_waits_and_the_others_what_computes() -> None:
    queued = ["tests/oracle llama", "tests/server/test_a.py", "tests/jobs/test_b.py", "tests/quant/test_c.py", ALONE]
    assert next_scope(queued, first=True) == "tests/server/test_a.py"
    assert next_scope(queued, first=False) == "tests/oracle llama"
    # Where only one kind is left, it is taken.
    assert next_scope(queued[1:3], first=False) == "tests/server/test_a.py"
    assert next_scope(queued[3:4], first=True) == "tests/quant/test_c.py"


def test_what_lasts_comes_before_others_of_its_kind() -> None:
    queued = [
        "tests/server/test_a.py",
        "tests/quant/test_c.py",
        "tests/server/test_soak.py",
        "tests/engine/test_soak.py",
    ]
    assert next_scope(queued, first=True) == "tests/server/test_soak.py"
    assert next_scope(queued, first=False) == "tests/engine/test_soak.py"
    assert next_scope(queued[:2], first=True) == "tests/server/test_a.py"
    # The longest first.
    assert next_scope([*queued, "tests/server/test_three_fronts.py"], first=True) == "tests/server/test_three_fronts.py"


def test_what_wants_the_machine_for_itself_comes_last() -> None:
    assert next_scope([ALONE, "tests/quant/test_c.py"], first=True) == "tests/quant/test_c.py"
    assert next_scope([ALONE], first=False) == ALONE


def test_the_first_process_has_the_cores_before_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    lowered: list[int] = []
    monkeypatch.setattr(os, "setpriority", lambda which, who, nice: lowered.append(nice))
    for worker in ({}, {"workerinput": {"workerid": "gw0"}}):
        pytest_configure(cast(Any, SimpleNamespace(**worker)))
    assert lowered == []
    pytest_configure(cast(Any, SimpleNamespace(workerinput={"workerid": "gw1"})))
    assert lowered == [max(NICE, os.getpriority(os.PRIO_PROCESS, 0))]


def test_the_first_process_is_the_same_whichever_is_ready_first() -> None:
    nodes = [SimpleNamespace(gateway=SimpleNamespace(id=f"gw{number}")) for number in (1, 0, 2)]
    assert first_of(nodes) is nodes[1]
    assert first_of(nodes[::2]) is nodes[0]
