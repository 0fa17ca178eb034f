"""`beheld chat` and `beheld bench serve` against a server, and the former in process."""

from __future__ import annotations

import io
import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from beheld.cli import plot
from beheld.cli.chat import shown
from beheld.cli.main import main
from tests import tiny
from tests.server.running import Running, data_url, talk

Capture = pytest.CaptureFixture[str]


def chat(monkeypatch: pytest.MonkeyPatch, capsys: Capture, lines: list[str], *words: Any) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(line + "\n" for line in lines)))
    status = main(["chat", "--temperature", "0", "--max-tokens", "12", *map(str, words)])
    found = capsys.readouterr()
    return status, found.out, found.err


def test_a_conversation_is_the_one_that_the_server_would_have(
    running: Running, monkeypatch: pytest.MonkeyPatch, capsys: Capture, tmp_path: Path
) -> None:
    picture = tmp_path / "p.png"
    tiny.picture(84, 56, 1).save(picture)
    lines = ["/add", f"/add {picture}", "What is it?", "And\\", "now?", "/receipt", "/nonsense", "/new", "Hello."]
    status, out, err = chat(monkeypatch, capsys, lines, "--url", running.url, "--system", "Be brief.")
    assert status == 0
    start: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}]

    def answer(messages: list[dict[str, Any]]) -> str:
        body = {"messages": messages, "max_tokens": 12, "temperature": 0}
        text: str = running.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
        return text

    one = [*start, *talk("What is it?", data_url(84, 56, seed=1))]
    two = [*one, {"role": "assistant", "content": answer(one)}, *talk("And\nnow?")]
    three = [*start, *talk("Hello.")]
    assert out == "".join(shown(answer(messages)) + "\n" for messages in (one, two, three))
    assert "image 1: " in err
    assert "/nonsense" in err
    running.idle()


def test_a_question_that_fails_leaves_the_conversation_as_it_was(
    running: Running, monkeypatch: pytest.MonkeyPatch, capsys: Capture, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no picture")
    lines = [f"/add {broken}", "What is it?", "/new", "Hello.", "/add /nonexistent.png", "/quit", "Never asked."]
    status, out, err = chat(monkeypatch, capsys, lines, "--url", running.url + "/v1")
    assert status == 0
    assert out.count("\n") >= 1
    assert "image 1" in err
    assert "nonexistent" in err
    assert chat(monkeypatch, capsys, ["Hello."], "--url", running.url)[1] == out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--url", "http://127.0.0.1:9"], "beheld serve"),
        (["--url", "http://127.0.0.1:9", "--max-model-len", "64"], "max_model_len"),
        (["--api-key", "x"], "--url"),
        (["/nonexistent.png", "--url", "http://127.0.0.1:9"], "Nothing answers"),
    ],
)
def test_wrong_words_are_told(monkeypatch: pytest.MonkeyPatch, capsys: Capture, words: list[str], told: str) -> None:
    status, _, err = chat(monkeypatch, capsys, ["x"], *words)
    assert status == 1
    assert told in err


def test_a_key_that_is_wrong_is_told(locked: Running, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    status, _, err = chat(monkeypatch, capsys, ["x"], "--url", locked.url, "--api-key", "wrong")
    assert status == 1
    assert "key" in err
    assert chat(monkeypatch, capsys, ["x"], "--url", locked.url, "--api-key", "key-two")[0] == 0


def test_a_conversation_in_process(monkeypatch: pytest.MonkeyPatch, capsys: Capture, tmp_path: Path) -> None:
    picture = tmp_path / "p.png"
    tiny.picture(84, 56, 1).save(picture)
    words = ["--model", tiny.checkpoint("qwen2_vl"), "--dtype", "float32", "--max-model-len", "512"]
    status, out, err = chat(monkeypatch, capsys, ["What?", "/receipt", "Again?"], picture, *words)
    assert status == 0
    assert len(out) > 2
    assert "image 1: " in err


def test_control_characters_do_nothing_to_the_terminal() -> None:
    assert shown("a\x1b[2J\x07\r\u202eb\n\tc\u00e9") == "a\ufffd[2J\ufffd\ufffd\ufffdb\n\tc\u00e9"


def test_a_ladder_of_clients(running: Running, capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "plot.svg"
    words = ["--clients", "1,3", "--requests", "4", "--tokens", "5", "--side", "56", "--plot", str(file)]
    assert main(["bench", "serve", "--url", running.url, *words]) == 0
    found = capsys.readouterr()
    (line,) = found.out.splitlines()
    told = json.loads(line)
    assert [(step["clients"], step["requests"], step["errors"]) for step in told["ladder"]] == [(1, 4, {}), (3, 4, {})]
    for step in told["ladder"]:
        assert step["tokens_per_s"] > 0
        assert 0 < step["first_token_ms"]["p50"] <= step["first_token_ms"]["p99"] <= step["total_ms"]["p99"]
    root = ET.fromstring(file.read_text())
    assert len(root.findall(".//{http://www.w3.org/2000/svg}polyline")) == 3
    running.idle()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--clients", "0"], "--clients"),
        (["--clients", "a"], "--clients"),
        (["--tokens", "0"], "--tokens"),
        (["--plot", "x.png"], ".svg"),
        (["--url", "http://127.0.0.1:9"], "beheld serve"),
    ],
)
def test_a_ladder_that_cannot_be_climbed(capsys: Capture, words: list[str], told: str) -> None:
    assert main(["bench", "serve", *words]) == 1
    assert told in capsys.readouterr().err


def test_a_plot_of_one_step_and_of_nothing_measured() -> None:
    line = {"clients": 4, "tokens_per_s": 0.0, "first_token_ms": {"p50": 0.0, "p99": 0.0}}
    assert ET.fromstring(plot.svg([line], "<a & b>"))
