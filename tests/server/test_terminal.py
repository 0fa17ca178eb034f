"""`beheld chat` and `beheld bench serve` against a server, and the former in process."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import re
import socket
import threading
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import httpx
import pytest

from beheld.cli import load, plot, remote
from beheld.cli.backends import AnswerStats, RemoteBackend
from beheld.cli.events import END, MAX_LINE, EventReader
from beheld.cli.main import main
from beheld.cli.terminal import shown
from tests import tiny
from tests.server.running import Running, data_url, talk

Capture = pytest.CaptureFixture[str]
NO_URLS = (
    *(
        "",
        "http://",
        "ftp://127.0.0.1",
        "127.0.0.1:8000",
        "http://127.0.0.1:99999",
        "http://127.0.0.1:a",
        "http://[::1",
    ),
    *(
        "http://127.0.0.1/a b",
        "http://127.0.0.1/?a",
        "http://key@127.0.0.1",
        "http://127.0.0.1\r\nHost: x",
        "http://:80",
    ),
)


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
        (["--url", "http://127.0.0.1:9", "--api-key", "\u00e9"], "API key"),
        *((["--url", url], "https://") for url in NO_URLS),
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


def test_bytes_that_are_no_text_are_marked_as_lost(
    running: Running, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    words = ["chat", "--temperature", "0", "--max-tokens", "4", "--url", running.url, "--system", "Be \udcff."]
    outs = []
    for question in (b"hi \xff\xfe\n", "hi \ufffd\ufffd\n".encode()):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(question), "utf-8"))
        assert main(words) == 0
        found = capsys.readouterr()
        assert "error" not in found.err
        outs.append(found.out)
    assert outs[0] == outs[1] != ""


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
    assert "tokens a second" in found.err
    assert found.err.isascii()
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
        (["--plot", "/nonexistent/x.svg"], "another folder"),
        (["--side", "100000"], "--side"),
        (["--api-key", "a\nb"], "API key"),
        (["--url", "http://127.0.0.1:9"], "beheld serve"),
        *((["--url", url], "https://") for url in NO_URLS),
    ],
)
def test_a_ladder_that_cannot_be_climbed(capsys: Capture, words: list[str], told: str) -> None:
    assert main(["bench", "serve", *words]) == 1
    assert told in capsys.readouterr().err


def test_a_plot_of_one_step_and_of_nothing_measured() -> None:
    line = {"clients": 4, "tokens_per_s": 0.0, "first_token_ms": {"p50": 0.0, "p99": 0.0}}
    assert ET.fromstring(plot.svg([line], "<a & b>"))
    assert plot.text([line], 80).splitlines()[1].split() == ["4", "0.0", "0", "(p99", "0)"]


def test_a_ladder_is_drawn_in_plain_characters() -> None:
    lines = [
        {"clients": clients, "tokens_per_s": rate, "first_token_ms": {"p50": median, "p99": high}}
        for clients, rate, median, high in ((1, 50.0, 10.0, 20.0), (8, 200.0, 30.0, 160.0))
    ]
    for width in (80, 120):
        drawn = plot.text(lines, width)
        assert drawn.isascii()
        assert width - 3 <= max(map(len, drawn.splitlines())) <= width
    one, two = drawn.splitlines()[1:]
    bars = [[len(bar) for bar in re.findall("[=-]+", row)] for row in (one, two)]
    # A quarter of the rate; an eighth of the highest 99th percentile.
    assert bars[0][0] * 4 == pytest.approx(bars[1][0], abs=4)
    assert bars[0][1] * 8 == pytest.approx(bars[1][1], abs=8)
    assert two.count("=") - bars[1][0] == round(bars[1][1] * 30 / 160)


MODELS = b'{"object": "list", "data": [{"id": "m", "object": "model"}]}'


class Deaf:
    """A listener that answers every question with the same bytes, and keeps what it was sent first.

    Args:
        answer: behind the headers; None never comes.
        headers: beside the usual ones.
        models: the answer to GET, if that is another.
        start: of every answer.
    """

    def __init__(
        self,
        answer: bytes | None,
        headers: bytes = b"",
        models: bytes | None = None,
        start: bytes = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n",
    ) -> None:
        self.heard: list[bytes] = []
        self._answer = answer if answer is None else start + headers + b"\r\n" + answer
        self._models = self._answer if models is None else start + b"\r\n" + models
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.at = f"127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        silent: list[socket.socket] = []
        while True:
            try:
                link, _ = self._socket.accept()
            except OSError:
                return
            heard = link.recv(1 << 16)
            self.heard.append(heard)
            answer = self._models if heard.startswith(b"GET") else self._answer
            if answer is None:
                silent.append(link)
                continue
            with link, contextlib.suppress(OSError):
                link.settimeout(10.0)
                link.sendall(answer)
                # A socket that is closed with anything unread resets the connection: what was cut off went away then.
                link.shutdown(socket.SHUT_WR)
                while link.recv(1 << 16):
                    pass

    def close(self) -> None:
        """End."""
        self._socket.close()


CHUNK = b'data: {"choices": [{"index": 0, "delta": {"content": "some words"}}]}\n\n'
NO_API = "does not speak OpenAI's API"
NO_CHUNK = ("not OpenAI's API", "is not in OpenAI's format")
# What answers -> what `bench serve` says of it, what `chat` says, and how it is made.
NONSENSE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "another server": (NO_API, NO_API, {"answer": b"<html>", "models": None}),
    "models of another form": (NO_API, NO_API, {"models": b'{"data": [3]}'}),
    "models nested deeply": (NO_API, NO_API, {"models": b"[" * 100_000}),
    "no HTTP": ("not speak HTTP", "not speak HTTP", {"models": None, "start": b"\0\xff nonsense"}),
    "not found": ("status 404", "status 404", {"models": None, "start": b"HTTP/1.1 404 No\r\n"}),
    "silence": ("silent", "silent", {"answer": None, "models": None}),
    "a page": ("cut", "cut off", {"answer": b"<html>"}),
    "no JSON": (*NO_CHUNK, {"answer": b"data: <html>\n\n"}),
    "no object": (*NO_CHUNK, {"answer": b"data: [1]\n\n"}),
    "no choices": (*NO_CHUNK, {"answer": b'data: {"choices": 3}\n\n'}),
    "no delta": (*NO_CHUNK, {"answer": b'data: {"choices": [{"delta": {"content": 3}}]}\n\n'}),
    "no usage": (*NO_CHUNK, {"answer": b'data: {"choices": [], "usage": {"prompt_tokens": 1}}\n\n'}),
    "nested deeply": (*NO_CHUNK, {"answer": b"data: " + b"[" * 100_000 + b"\n\n"}),
    "no chunks": (NO_CHUNK[0], "went away", {"answer": b"zz\r\n", "headers": b"Transfer-Encoding: chunked\r\n"}),
    "nothing": ("empty", "", {"answer": b"data: [DONE]\n\n"}),
    "cut off": ("cut", "cut off", {"answer": CHUNK}),
    "an error": ("broken", "it is so", {"answer": b'data: {"error": {"code": "broken", "message": "it is so"}}\n\n'}),
    "a short error": ("error", "it is so", {"answer": b'data: {"error": "it is so"}\n\n'}),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_what_is_no_server_of_openais_api_is_told(name: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(remote, "_PROBE_S", 0.3)
    of_bench, of_chat, made = NONSENSE[name]
    deaf = Deaf(**{"answer": b"", "models": MODELS, **made})
    words = ["--clients", "2", "--requests", "2", "--tokens", "1", "--side", "0"]
    assert main(["bench", "serve", "--url", f"http://{deaf.at}", *words]) == 1
    found = capsys.readouterr()
    assert of_bench in found.err
    assert found.out == ""
    status, out, err = chat(monkeypatch, capsys, ["Hello."], "--url", f"http://{deaf.at}")
    assert of_chat in err
    assert status == (1 if deaf.heard[-1].startswith(b"GET") or not deaf.heard[-1] else 0)
    assert out in ("", "\n", "some words\n")
    deaf.close()


def test_an_answer_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(load, "TIMEOUT_S", 0.3)
    deaf = Deaf(None, models=MODELS)
    assert main(["bench", "serve", "--url", f"http://{deaf.at}", "--clients", "2", "--side", "0"]) == 1
    assert "no end" in capsys.readouterr().err
    deaf.close()


def test_what_a_server_says_does_nothing_to_the_terminal(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    deaf = Deaf(b'{"error": {"message": "\\u001b[2J"}}', start=b"HTTP/1.1 400 No\r\n")
    assert main(["bench", "serve", "--url", f"http://{deaf.at}"]) == 1
    assert chat(monkeypatch, capsys, ["x"], "--url", f"http://{deaf.at}")[2].endswith("beheld: \ufffd[2J\n")
    deaf.close()


def test_a_line_without_an_end_is_not_kept() -> None:
    reader = EventReader()
    for _ in range(MAX_LINE >> 20):
        reader.push(b"a" * (1 << 20))
    with pytest.raises(ValueError, match="no end"):
        reader.push(b"a")


def test_a_key_for_https_is_never_sent_in_clear_text(capsys: Capture) -> None:
    deaf = Deaf(b"")
    words = ["--clients", "1", "--requests", "1", "--tokens", "1", "--side", "0", "--api-key", "secret-key"]
    assert main(["bench", "serve", "--url", f"https://{deaf.at}", *words]) == 1
    assert "Nothing answers" in capsys.readouterr().err
    seen = load.LoadResult()
    asyncio.run(load.ask(f"https://{deaf.at}/v1", "secret-key", b"{}", seen))
    assert list(seen.errors) == ["SSLError"]
    assert all(heard[:1] == b"\x16" for heard in deaf.heard), "no TLS handshake"
    assert all(b"secret-key" not in heard for heard in deaf.heard)
    deaf.close()


def test_a_stream_is_cut_at_line_feeds_alone(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """U+2028 ends a line in Python's eyes and not in those of the standard for server-sent events."""
    chunk = {"choices": [{"index": 0, "delta": {"content": "a\u2028b\x85c\u00e9"}}]}
    deaf = Deaf(f"data: {json.dumps(chunk, ensure_ascii=False)}\n\ndata: [DONE]\n\n".encode())
    remote = object.__new__(RemoteBackend)
    remote.name, remote._options = "m", {}
    remote._client = httpx.Client(base_url=f"http://{deaf.at}/v1", trust_env=False)
    assert list(remote.answer([], AnswerStats())) == ["a\u2028b\x85c\u00e9"]
    remote.close()
    seen = load.LoadResult()
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
    seen = load.LoadResult()
    asyncio.run(load.ask(f"http://{deaf.at}/v1", "k", b"{}", seen, 0))
    assert (seen.texts, seen.errors) == (({0: "some words" * 2}, {}) if last else ({}, {"cut": 1}))
    deaf.close()


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_events_are_read_however_they_are_cut(size: int) -> None:
    words = ": kept alive\n\ndata: é\u2028\r\n\r\nevent: x\ndata:one\ndata: two\nid: 3\n\ndata: [DONE]\n\ndata: cut"
    text = words.encode()
    reader = EventReader()
    found = [data for start in range(0, len(text), size) for data in reader.push(text[start : start + size])]
    assert found == ["é\u2028", "one\ntwo", END]
