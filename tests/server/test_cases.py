"""Every numbered case has a test, and the page that says which is true."""

from __future__ import annotations

import re

from tests.server.cases import CASES, ROOT, runs


def test_every_case_has_a_test() -> None:
    found = runs()
    assert set(found) <= set(CASES), "a test has the number of a case that is not in the table"
    missing = set(CASES) - set(found)
    assert not missing, f"no test runs {sorted(missing)}"


def test_the_page_names_tests_that_there_are() -> None:
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    there = {number: {name.removeprefix("tests/") for name in names} for number, names in runs().items()}
    rows = re.findall(r"^\| (\d+) \| .*? \| (.*) \|$", page, re.MULTILINE)
    assert [int(number) for number, _ in rows] == sorted(CASES)
    for number, names in rows:
        told = set(re.findall(r"`([^`]+)`", names))
        assert told <= there.get(int(number), set()), f"docs/reliability.md names tests of case {number} that are gone"
        assert told
