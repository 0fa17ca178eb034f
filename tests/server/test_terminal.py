"""`beheld chat` and `beheld bench serve` against a server, and the former in process."""

from __future__ import annotations

import asyncio
import io
import json
import socket
import threading
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import httpx
import pytest

from beheld.cli import load, plot
from beheld.cli.chat import shown
from beheld.cli.events import END, EventReader
from beheld.cli.main import main
from beheld.cli.talk import Remote, Told
from beheld.core.errors import FetchError
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
        (["--url", "ftp://127.0.0.1"], "https://"),
        (["--url", "127.0.0.1:8000"], "https://"),
    ],
)
def test_a_ladder_that_cannot_be_climbed(capsys: Capture, words: list[str], told: str) -> None:
    assert main(["bench", "serve", *words]) == 1
    assert told in capsys.readouterr().err


def test_a_plot_of_one_step_and_of_nothing_measured() -> None:
    line = {"clients": 4, "tokens_per_s": 0.0, "first_token_ms": {"p50": 0.0, "p99": 0.0}}
    assert ET.fromstring(plot.svg([line], "<a & b>"))


class Deaf:
    """A listener that answers every connection with the same bytes, and keeps what it was sent first."""

    def __init__(self, answer: bytes, headers: bytes = b"") -> None:
        self.heard: list[bytes] = []
        self._answer = headers + b"\r\n" + answer
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.at = f"127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                link, _ = self._socket.accept()
            except OSError:
                return
            with link:
                self.heard.append(link.recv(1 << 16))
                link.sendall(
                    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n" + self._answer
                )

    def close(self) -> None:
        """End."""
        self._socket.close()


def test_a_key_for_https_is_never_sent_in_clear_text(capsys: Capture) -> None:
    deaf = Deaf(b"")
    words = ["--clients", "1", "--requests", "1", "--tokens", "1", "--side", "0", "--api-key", "secret-key"]
    assert main(["bench", "serve", "--url", f"https://{deaf.at}", *words]) == 1
    assert "gives no answers" in capsys.readouterr().err
    assert deaf.heard[0][:1] == b"\x16", "no TLS handshake"
    assert all(b"secret-key" not in heard for heard in deaf.heard)
    deaf.close()


def test_a_stream_is_cut_at_line_feeds_alone(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """U+2028 ends a line in Python's eyes and not in those of the standard for server-sent events."""
    chunk = {"choices": [{"index": 0, "delta": {"content": "a\u2028b\x85c\u00e9"}}]}
    deaf = Deaf(f"data: {json.dumps(chunk, ensure_ascii=False)}\n\ndata: [DONE]\n\n".encode())
    remote = object.__new__(Remote)
    remote.name, remote._options = "m", {}
    remote._client = httpx.Client(base_url=f"http://{deaf.at}/v1", trust_env=False)
    assert list(remote.answer([], Told())) == ["a\u2028b\x85c\u00e9"]
    remote.close()
    seen = load.Seen()
    asyncio.run(load.ask(f"http://{deaf.at}/v1", "k", b"{}", seen, 0))
    assert (seen.texts, seen.errors) == ({0: "a\u2028b\x85c\u00e9"}, {})
    deaf.close()


@pytest.mark.parametrize("size", [1, 7, 4096])
@pytest.mark.parametrize("end", [b"0\r\n\r\n", b"", b"ff\r\nda"], ids=["whole", "closed", "torn"])
def test_an_answer_in_chunks_is_read_however_its_events_are_cut(size: int, end: bytes) -> None:
    """Not every server leaves HTTP's chunks out because it was asked in HTTP/1.0."""
    event = b'data: {"choices": [{"index": 0, "delta": {"content": "some words"}}]}\n\n'
    last = b"data: [DONE]\n\n" if end.startswith(b"0") else b""
    body = event * 2 + last
    parts = [body[start : start + size] for start in range(0, len(body), size)]
    chunks = b"".join(b"%x;name=value\r\n%b\r\n" % (len(part), part) for part in parts)
    deaf = Deaf(chunks + end, b"Transfer-Encoding: chunked\r\n")
    seen = load.Seen()
    asyncio.run(load.ask(f"http://{deaf.at}/v1", "k", b"{}", seen, 0))
    assert (seen.texts, seen.errors) == (({0: "some words" * 2}, {}) if last else ({}, {"cut": 1}))
    deaf.close()


def test_a_stream_that_is_none_is_told() -> None:
    deaf = Deaf(b"data: <html>\n\n")
    remote = object.__new__(Remote)
    remote.name, remote._options = "m", {}
    remote._client = httpx.Client(base_url=f"http://{deaf.at}/v1", trust_env=False)
    with pytest.raises(FetchError, match="no JSON"):
        list(remote.answer([], Told()))
    remote.close()
    deaf.close()


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_events_are_read_however_they_are_cut(size: int) -> None:
    words = ": kept alive\n\ndata: é\u2028\r\n\r\nevent: x\ndata:one\ndata: two\nid: 3\n\ndata: [DONE]\n\ndata: cut"
    text = words.encode()
    reader = EventReader()
    found = [data for start in range(0, len(text), size) for data in reader.push(text[start : start + size])]
    assert found == ["é\u2028", "one\ntwo", END]
