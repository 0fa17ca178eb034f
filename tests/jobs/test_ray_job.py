"""A job in a Ray cluster: what is sent, what is written, and the error without Ray. No test here needs Ray."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from beheld.cli.main import main
from beheld.jobs import ray_job
from beheld.jobs.items import BadLine, Item
from beheld.jobs.job import Ledger, Progress
from beheld.jobs.output import OutputFile

BODY: dict[str, Any] = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}


def item(number: int, size: int = 2) -> Item:
    return Item(number, f"n{number}", "/v1/chat/completions", b"x" * size)


def ledger(path: Path, *, resume: bool = False) -> tuple[Ledger, Progress, OutputFile]:
    output, progress = OutputFile(path, resume=resume), Progress()
    return Ledger(output, progress, lambda progress: None), progress, output


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_blocks_are_bounded_by_items_and_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_job, "_ITEMS", 3)
    monkeypatch.setattr(ray_job, "_BYTES", 10)
    own, _, output = ledger(tmp_path / "out")
    given = [item(1), item(2), item(3), item(4), item(5, 9), item(6, 20), item(7)]
    found = [[row["custom_id"] for row in rows] for rows in ray_job.blocks(iter(given), own)]
    assert found == [["n1", "n2", "n3"], ["n4"], ["n5"], ["n6"], ["n7"]]
    output.close()


def test_an_item_that_two_engines_answer_has_one_line(tmp_path: Path) -> None:
    own, progress, output = ledger(tmp_path / "out")
    assert own.take(item(1)) is not None
    for _ in range(2):
        own.answer("n1", 200, "r", BODY)
    own.answer("never asked", 200, "r", BODY)
    own.end()
    output.close()
    assert [line["custom_id"] for line in lines(tmp_path / "out")] == ["n1"]
    assert (progress.answered, progress.prompt_tokens, progress.output_tokens) == (1, 3, 2)


def test_a_resumed_job_sends_only_what_has_no_line(tmp_path: Path) -> None:
    given: list[Item | BadLine] = [item(1), item(2), BadLine(3, "invalid_json_line", "It is none.")]
    own, _, output = ledger(tmp_path / "out")
    sent = list(ray_job.blocks(iter(given), own))
    assert [row["custom_id"] for row in sent[0]] == ["n1", "n2"]
    own.answer("n2", 500, "r", {"error": {"message": "It failed.", "code": "failed"}})
    output.close()
    own, progress, output = ledger(tmp_path / "out", resume=True)
    (rows,) = ray_job.blocks(iter(given), own)
    assert [row["custom_id"] for row in rows] == ["n1"]
    own.answer("n1", 200, "r", BODY)
    own.end()
    output.close()
    assert (progress.skipped, progress.unknown) == (2, 0)
    assert sorted(str(line["custom_id"]) for line in lines(tmp_path / "out")) == ["None", "n1", "n2"]


def test_without_ray_the_output_is_not_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    (tmp_path / "in.jsonl").write_text("")
    assert main(["batch", str(tmp_path / "in.jsonl"), str(tmp_path / "out"), "--ray", "--device", "cpu"]) == 1
    assert "pip install 'beheld[ray]'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
