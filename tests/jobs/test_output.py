"""The output of a job: whole lines, each item once, wherever a writer was killed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from beheld.core.errors import ConfigError
from beheld.jobs.output import OutputFile, key_of

NAMES = st.lists(st.text(min_size=1, max_size=12), min_size=1, max_size=8, unique=True)


def line(custom_id: str | None, number: int = 0) -> dict[str, object]:
    error = None if custom_id is not None else {"code": "x", "message": "y", "line": number}
    return {"id": "batch_req_0a", "custom_id": custom_id, "response": {"body": "\u2028é\n"}, "error": error}


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(names=NAMES, cut=st.floats(0, 1))
def test_a_file_cut_anywhere_keeps_all_whole_lines_and_gets_each_item_once(
    tmp_path: Path, names: list[str], cut: float
) -> None:
    path = tmp_path / "out.jsonl"
    path.unlink(missing_ok=True)
    output = OutputFile(path, resume=False)
    for name in names:
        output.append(line(name))
    output.append(line(None, 7))
    output.close()
    data = path.read_bytes()
    end = round(cut * len(data))
    path.write_bytes(data[:end])
    kept = data[:end].count(b"\n")
    keys = [*map(key_of, names), key_of(None, 7)]
    output = OutputFile(path, resume=True)
    assert output.done == set(keys[:kept])
    for name in names[kept:]:
        output.append(line(name))
    if kept <= len(names):
        output.append(line(None, 7))
    output.close()
    found = [json.loads(row)["custom_id"] for row in path.read_bytes().split(b"\n")[:-1]]
    assert found == [*names, None]


def test_what_no_job_wrote_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    for text in ("one line without an end", '{"a": 1}\n', '{"id": "batch_req_0a", "custom_id": "b", \n', "x\ny"):
        path.write_text(text)
        with pytest.raises(ConfigError, match="Line 1"):
            OutputFile(path, resume=True)
        with pytest.raises(ConfigError, match="--resume"):
            OutputFile(path, resume=False)
        assert path.read_text() == text


def test_two_jobs_do_not_write_one_file(tmp_path: Path) -> None:
    output = OutputFile(tmp_path / "out", resume=False)
    with pytest.raises(ConfigError, match="another job"):
        OutputFile(tmp_path / "out", resume=True)
    output.close()
    OutputFile(tmp_path / "out", resume=False).close()


def test_a_full_disk_leaves_the_lines_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out"
    output = OutputFile(path, resume=False)
    output.append(line("a"))
    write, calls = os.write, list[int]()

    def full(fd: int, data: memoryview) -> int:
        calls.append(fd)
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        return write(fd, data[:5])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(ConfigError, match="No space left"):
        output.append(line("b"))
    monkeypatch.undo()
    output.append(line("c"))
    output.close()
    assert [json.loads(row)["custom_id"] for row in path.read_text().splitlines()] == ["a", "c"]
