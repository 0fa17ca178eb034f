"""Jobs: every item once after kills, errors as lines, the server's own answers."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from beheld.cli.main import main
from tests import tiny
from tests.long import sized

MODEL = ("--dtype", "float32", "--max-model-len", "512", "--num-gpu-blocks-override", "200", "--max-num-seqs", "4")


def asked(custom_id: str, url: str = "/v1/chat/completions", **body: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(row) for row in path.read_bytes().split(b"\n")[:-1]]


def test_a_job_killed_at_random_moments_has_each_item_once(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    kills, number = sized(4, 100), sized(1000, 12_000)
    lines = [asked(f"é{i}", n=i) for i in range(number)]
    lines[5] = "{broken"
    lines[50] = lines[49]
    source.write_text("\n".join(lines))
    command = [sys.executable, "-m", "tests.jobs.killed", str(source), str(target), str(kills)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert int(done.stdout) == kills
    found = rows(target)
    good = {f"é{i}" for i in range(number)} - {"é5", "é50"}
    assert Counter(row["custom_id"] for row in found if row["custom_id"] is not None) == Counter(good)
    assert all(row["response"]["body"]["said"] == int(row["custom_id"][1:]) for row in found if row["custom_id"])
    errors = {row["error"]["line"]: row["error"]["code"] for row in found if row["custom_id"] is None}
    assert errors == {6: "invalid_json_line", 51: "duplicate_custom_id"}
    assert len(found) == number


def test_resuming_ten_thousand_items_takes_less_than_two_seconds(tmp_path: Path) -> None:
    from beheld.jobs.items import read_items
    from beheld.jobs.output import OutputFile, key_of

    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(asked(f"r{i}", n=i) + "\n" for i in range(10_000)))
    line = '{{"id": "batch_req_0a", "custom_id": "r{}", "response": {{"body": "{}"}}, "error": null}}\n'
    target.write_text("".join(line.format(i, "x" * 2000) for i in range(10_000)))
    begin = time.process_time()
    output = OutputFile(target, resume=True)
    left = [item for item in read_items(source) if key_of(item.custom_id) not in output.done]
    took = time.process_time() - begin
    output.close()
    assert not left
    assert len(output.done) == 10_000
    assert took < 2.0


def test_every_route_of_vectors_and_scores_may_be_named(tmp_path: Path) -> None:
    from beheld.jobs.items import Item, read_items
    from beheld.server.pooling_routes import POOLING_ROUTES

    source = tmp_path / "in.jsonl"
    source.write_text("".join(asked(path, path) + "\n" for path, _ in POOLING_ROUTES))
    assert [item.url for item in read_items(source) if isinstance(item, Item)] == [path for path, _ in POOLING_ROUTES]


def test_answers_and_errors_are_the_servers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from openai.types.chat import ChatCompletion

    picture = tmp_path / "p.png"
    tiny.pictures(1, 0)[0].save(picture)
    (tmp_path / "bad.png").write_bytes(b"no picture")

    def look(name: str) -> dict[str, Any]:
        url = (tmp_path / name).as_uri()
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What?"}]
        return {"messages": [{"role": "user", "content": parts}], "max_tokens": 3, "temperature": 0}

    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    bad = {
        "url": asked("url", "/v1/files"),
        "method": json.dumps({"custom_id": "m", "method": "GET", "url": "/v1/completions", "body": {}}),
        "stream": asked("s", stream=True, **look("p.png")),
        "list": "[]",
        "twice": asked("good", **look("p.png")),
        "field": json.dumps({"custom_id": "f", "methode": "POST"}),
    }
    source.write_text("\n".join([asked("good", **look("p.png")), asked("image", **look("bad.png")),
                                 asked("field", wrong=1, **look("p.png")), asked("text", "/v1/completions", prompt="A"),
                                 *bad.values(), ""]))  # fmt: skip
    words = [
        "run-batch",
        "-i",
        str(source),
        "-o",
        str(target),
        "--model",
        str(tiny.checkpoint("qwen2_vl")),
        "--enable-auto-tool-choice",
        *MODEL,
    ]
    # All that can be answered is, and the status says that the input is wrong.
    assert main([*words, "--allowed-local-media-path", str(tmp_path)]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "\r" not in shown.err
    assert "2 answered, 8 failed" in shown.err
    assert "2 lines have not the form of a request" in shown.err
    found = {row["custom_id"]: row for row in rows(target) if row["custom_id"] is not None}
    assert set(found) == {"good", "image", "field", "text", "url", "m", "s", "f"}
    assert {name: found[name]["error"]["code"] for name in ("url", "m", "s", "f")} == {
        "url": "invalid_url", "m": "invalid_method", "s": "invalid_body", "f": "unknown_field",
    }  # fmt: skip
    answer = ChatCompletion.model_validate(found["good"]["response"]["body"], strict=True)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3
    assert found["good"]["error"] is None
    for name in ("image", "field"):
        assert found[name]["response"]["status_code"] == 400
        assert found[name]["error"]["message"] == found[name]["response"]["body"]["error"]["message"]
    assert "wrong" in found["field"]["error"]["message"]
    errors = {row["error"]["line"]: row["error"]["code"] for row in rows(target) if row["custom_id"] is None}
    assert errors == {8: "invalid_json_line", 9: "duplicate_custom_id"}
    # The same command without --resume destroys nothing.
    before = target.read_bytes()
    assert main(words) == 1
    assert "--resume" in capsys.readouterr().err
    assert target.read_bytes() == before


def test_a_folder_of_media_is_asked_one_question(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "in"
    (folder / "deep").mkdir(parents=True)
    for number, picture in enumerate(tiny.pictures(2, 0)):
        picture.save(folder / ("deep" if number else "") / f"{number} ü.png")
    (folder / "notes.txt").write_text("no medium")
    target = tmp_path / "out.jsonl"
    model = ["--model", str(tiny.checkpoint("qwen2_vl")), *MODEL, "--max-tokens", "2"]
    assert main(["batch", str(folder), str(target), *model]) == 1
    assert "--prompt" in capsys.readouterr().err
    assert main(["batch", str(folder / "*.png"), str(target), "--prompt", "What?", *model]) == 0
    assert [row["custom_id"] for row in rows(target)] == ["0 ü.png"]
    assert main(["batch", str(folder), str(target), "--prompt", "What?", "--resume", *model]) == 0
    assert "1 answered, 0 failed" in capsys.readouterr().err
    assert [row["custom_id"] for row in rows(target)] == ["0 ü.png", "deep/1 ü.png"]
