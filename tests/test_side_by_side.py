"""How files of tests are shared out to processes that run side by side."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import ALONE, WAITING, next_scope

ROOT = Path(__file__).parents[1]


def test_the_folders_and_the_file_are_there() -> None:
    assert all((ROOT / folder).is_dir() for folder in WAITING)
    # pytest knows the mark by its name alone; this file speaks of it, too.
    marked = [path for path in ROOT.glob("tests/**/test_*.py") if "pytest.mark.alone" in path.read_text("utf-8")]
    assert [str(path.relative_to(ROOT)) for path in marked if path != Path(__file__)] == [ALONE]


def test_what_waits_goes_with_what_computes() -> None:
    queued = ["tests/oracle llama", "tests/server/test_a.py", "tests/jobs/test_b.py", "tests/quant/test_c.py", ALONE]
    assert next_scope(queued, []) == "tests/server/test_a.py"
    assert next_scope(queued, ["tests/text/test_d.py"]) == "tests/server/test_a.py"
    assert next_scope(queued, ["tests/server/test_e.py"]) == "tests/oracle llama"
    # Where only one kind is left, it is taken.
    assert next_scope(queued[1:3], ["tests/server/test_e.py"]) == "tests/server/test_a.py"
    assert next_scope(queued[3:4], ["tests/text/test_d.py"]) == "tests/quant/test_c.py"


def test_what_wants_the_machine_for_itself_comes_last() -> None:
    assert next_scope([ALONE, "tests/quant/test_c.py"], []) == "tests/quant/test_c.py"
    assert next_scope([ALONE], ["tests/quant/test_c.py"]) == ALONE
