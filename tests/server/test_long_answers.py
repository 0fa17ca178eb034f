"""Log-probabilities of long prompts are written in pieces: the server holds their columns, and never the whole text."""

from __future__ import annotations

import base64
import gc
import io
import json
import socket
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from beheld.core.outputs import Logprob
from beheld.server import completions
from beheld.server.admission import AdmissionControl
from beheld.server.errors import HttpError
from beheld.server.json_pieces import LongJson, LongList, LongText
from beheld.server.options import ServerOptions
from tests.long import sized
from tests.server.running import Running, received, watched
from tests.server.slowness import slowness

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
# Prompts of some length, 20 candidates each: half a megabyte of text a prompt.
_IDS = [[5 + (n + k) % 50 for k in range(sized(600, 2000))] for n in range(4)]
_ASK = {"prompt": _IDS, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 20}


def _sent() -> bytes:
    body = json.dumps(_ASK).encode()
    head = f"POST {COMPLETE} HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


@pytest.mark.parametrize("values", [[], [1], list(range(30_000))], ids=len)
def test_the_text_is_that_of_plain_lists(values: list[int]) -> None:
    word = 'café "x" \n'
    long = {"a": word, "b": [{"c": LongList(lambda: iter(values)), "d": LongList(lambda: values, lambda: [word])}]}
    plain = {"a": word, "b": [{"c": values, "d": [*values, word]}]}
    pieces = list(LongJson(long).pieces())
    assert b"".join(pieces) == json.dumps(plain, ensure_ascii=False, separators=(",", ":")).encode()
    assert max(map(len, pieces)) < 17 << 10
    assert max(piece.count(b",") for piece in pieces) < 260
    assert list(LongJson(long).pieces()) == pieces


def test_elements_are_made_when_they_are_written() -> None:
    made = 0

    def values() -> Iterator[str]:
        nonlocal made
        for _ in range(1000):
            made += 1
            yield "x" * 1000

    pieces = LongJson([LongList(values)]).pieces()
    assert made == 0
    next(pieces)
    assert made < 40


@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (5, 3), (2000, 32)])
def test_a_long_array_is_written_in_short_pieces(shape: tuple[int, int]) -> None:
    scores = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    text = LongText(partial(completions._as_file, scores))
    pieces = list(LongJson({"a": text, "b": LongList(lambda: [1])}).pieces())
    file = io.BytesIO()
    np.save(file, scores)
    assert json.loads(b"".join(pieces)) == {"a": base64.b64encode(file.getvalue()).decode(), "b": [1]}
    assert max(map(len, pieces)) < 21 << 10


def test_what_is_no_json_is_an_error() -> None:
    with pytest.raises(TypeError):
        LongJson({"a": object()})
    with pytest.raises(ValueError, match="Out of range"):
        list(LongJson(LongList(lambda: [float("nan")])).pieces())


@pytest.mark.case(119)
def test_log_probabilities_come_in_pieces_and_keep_nobody_waiting(running: Running) -> None:
    # Texts of tokens are made once.
    running.post(COMPLETE, _ASK)
    with watched(running) as late:
        answer = running.post(COMPLETE, _ASK)
    assert answer.status_code == 200
    assert answer.headers["transfer-encoding"] == "chunked"
    for ids, choice in zip(_IDS, answer.json()["choices"], strict=True):
        entries = choice["prompt_logprobs"]
        assert entries[0] is None
        assert all(str(token) in entry for token, entry in zip(ids[1:], entries[1:], strict=True))
    assert len(answer.content) > 1 << 20
    # The text of one of these prompts alone takes longer.
    assert sorted(late)[-3] < 0.05 * slowness()
    running.idle()


@pytest.mark.case(119)
def test_while_nobody_reads_little_is_made(running: Running) -> None:
    # Connections have it from the listener; else the kernel may take the whole answer.
    before = running.listener.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // 2
    running.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16_384)
    with socket.socket() as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        link.connect(("127.0.0.1", running.port))
        link.settimeout(20)
        link.sendall(_sent())
        assert link.recv(12) == b"HTTP/1.1 200"
        running.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, before)
        time.sleep(0.1)
        # One position at a time, of 21 candidates; as objects there would be 50,000.
        assert sum(isinstance(found, Logprob) for found in gc.get_objects()) < 1000
        assert running.admission.held_bytes > 0
        data = received(link)
    assert data.endswith(b"\r\n0\r\n\r\n")
    running.idle()
    assert running.admission.held_bytes == 0


@pytest.mark.case(119)
def test_a_client_that_leaves_gives_the_columns_back(running: Running) -> None:
    with socket.create_connection(("127.0.0.1", running.port), 20) as link:
        link.sendall(_sent())
        assert link.recv(12) == b"HTTP/1.1 200"
    running.idle()
    assert running.admission.held_bytes == 0


@pytest.mark.case(119)
def test_columns_have_a_bound() -> None:
    admission = AdmissionControl(ServerOptions(max_body_bytes=1 << 20, max_reading_bytes=1 << 20))
    with pytest.raises(HttpError) as caught:
        admission.hold_columns(2 << 20)
    assert (caught.value.status, caught.value.param) == (400, "prompt_logprobs")
    with admission.hold_columns(900_000), pytest.raises(HttpError) as caught:
        admission.hold_columns(900_000)
    assert caught.value.status == 503
    assert admission.held_bytes == 0
    with admission.hold_columns(900_000):
        pass


def test_a_chat_has_the_same_entries(running: Running) -> None:
    messages = [{"role": "user", "content": "a small cat sat"}]
    ask = {"messages": messages, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 2}
    found: dict[str, Any] = running.post(CHAT, ask).json()
    ids = running.post("/tokenize", {"messages": messages}).json()["tokens"]
    assert len(found["prompt_logprobs"]) == len(ids)
    assert found["prompt_logprobs"][0] is None
    for token, entry in zip(ids[1:], found["prompt_logprobs"][1:], strict=True):
        assert len(entry) in (2, 3)
        assert set(entry[str(token)]) == {"logprob", "rank", "decoded_token"}


@pytest.mark.case(119)
def test_what_is_held_shrinks_once_the_prompt_is_known() -> None:
    """A chat may have the longest prompt that there is: five short ones would keep all others out."""
    admission = AdmissionControl(ServerOptions(max_body_bytes=1 << 20, max_reading_bytes=8 << 20))
    held = admission.hold_columns(6 << 20)
    assert admission.held_bytes > 5 << 20
    held.shrink(1 << 20)
    assert 0 < admission.held_bytes <= 1 << 20
    held.shrink(2 << 20)
    assert admission.held_bytes <= 1 << 20
    held.release()
    held.shrink(100)
    assert admission.held_bytes == 0
