"""Texts of many letters: read in time that grows with them, refused once they cannot fit, in nobody's way."""

from __future__ import annotations

import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import httpx
import pytest
from pydantic import ValidationError
from tokenizers import AddedToken
from transformers import AutoTokenizer

from beheld.server import body_schema, schema, serve
from beheld.server.options import ServerOptions
from tests import tiny
from tests.server.running import ENGINE, Running, talk
from tests.server.slowness import slowness

CHAT = "/v1/chat/completions"
COMPLETE = "/v1/completions"
LIMIT = 4096
LONGEST = 128
HARD = ["x", "a ", "x y", "e\u0301", "\u200b", "<|im_start|>", " ", "\n", "\U0001f600", "0", "\u4f60\u597d\uff0c"]


@pytest.fixture(scope="module")
def lengthy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A model with one long token, as the vocabularies of large models have: length alone refuses little."""
    folder = tmp_path_factory.mktemp("lengthy") / "model"
    shutil.copytree(tiny.checkpoint("qwen2_vl"), folder)
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    tokenizer.add_tokens([AddedToken("-" * LONGEST, normalized=False)])
    tokenizer.save_pretrained(str(folder))
    found = Running(folder, {**ENGINE, "max_model_len": LIMIT})
    yield found
    found.close()


@pytest.mark.parametrize("what", HARD, ids=ascii)
def test_42_hard_texts_are_read_in_linear_time(lengthy: Running, what: str) -> None:
    """Both sizes are such that only reading the text can tell its tokens."""

    def seconds(size: int) -> float:
        assert size < LIMIT * LONGEST
        body = {"prompt": what * (size // len(what.encode()))}
        best = 60.0
        for _ in range(2):
            begin = time.perf_counter()
            answer = lengthy.post("/tokenize", body)
            best = min(best, time.perf_counter() - begin)
            if answer.status_code != 200:
                assert answer.status_code == 400, answer.text
                assert "tokens" in answer.json()["error"]["message"]
                assert "characters" not in answer.json()["error"]["message"]
        return best

    once, twice = seconds(60_000), seconds(480_000)
    assert twice < 8 * 2.5 * max(once, 0.02), (once, twice)


def test_42_long_texts_hold_nobody_up(lengthy: Running) -> None:
    """Small requests beside the longest texts that arithmetic lets through, four at a time, and texts beyond them."""
    whole = {"prompt": "x y" * (LIMIT * LONGEST // 3), "max_tokens": 1}
    spelled = {"messages": talk("<|im_end|>" + "x y" * (LIMIT * LONGEST // 3 - 100)), "max_tokens": 1}
    unbroken = {"prompt": "\u200b" * (LIMIT * LONGEST - 1), "max_tokens": 1}
    beyond = {"prompt": " " * (7 << 20)}
    small = {"prompt": "hello", "max_tokens": 1}
    # What is made with the first long text, once, is not what this measures.
    lengthy.post(COMPLETE, whole)
    lengthy.post(CHAT, spelled)
    stop = threading.Event()
    waits: list[float] = []
    long: list[float] = []

    def ask_small() -> None:
        with httpx.Client(base_url=lengthy.url, trust_env=False, timeout=60) as client:
            while not stop.wait(0.005):
                begin = time.perf_counter()
                assert client.post(COMPLETE, json=small).status_code == 200
                waits.append(time.perf_counter() - begin)

    def ask_long(route: str, body: dict[str, Any]) -> None:
        begin = time.perf_counter()
        answer = lengthy.post(route, body)
        long.append(time.perf_counter() - begin)
        assert answer.status_code == 400, answer.text
        assert "tokens" in answer.json()["error"]["message"]

    asking = threading.Thread(target=ask_small)
    asking.start()
    try:
        for route, body in ((COMPLETE, whole), (CHAT, spelled), (COMPLETE, unbroken), ("/tokenize", beyond)):
            crowd = [threading.Thread(target=ask_long, args=(route, body)) for _ in range(4)]
            for thread in crowd:
                thread.start()
            for thread in crowd:
                thread.join()
    finally:
        stop.set()
        asking.join()
    assert len(long) == 16
    slower = slowness()
    assert max(long) < 3.0 * slower, long
    assert len(waits) > 3
    assert max(waits) < 1.0 * slower, max(waits)


def test_42_a_long_text_that_fits_has_the_ids_of_its_parts(lengthy: Running) -> None:
    """More letters than are read at once, and fewer tokens than the limit."""
    piece = "-" * LONGEST + " "
    ids = lengthy.post("/tokenize", {"prompt": piece * 10}).json()["tokens"]
    assert len(ids) % 10 == 0
    answer = lengthy.post("/tokenize", {"prompt": piece * 1000}).json()
    assert answer["tokens"][: len(ids)] == ids
    assert answer["count"] == 100 * len(ids)


def test_89_long_lists_of_ids_are_checked_in_steps() -> None:
    """One step for half a million ids keeps the interpreter, and so /health, for 17 ms."""
    steps: list[int] = []

    def check(some: list[int]) -> list[int]:
        steps.append(len(some))
        return some

    ids = list(range(50_000))
    assert body_schema._in_steps(ids, check) == ids
    assert max(steps) < 20_000
    assert schema.CompletionRequest.model_validate({"prompt": ids}).prompt == ids
    with pytest.raises(ValidationError) as error:
        schema.CompletionRequest.model_validate({"prompt": [*ids, -1, "a"]})
    # The first wrong entry, by its place in the whole list.
    assert [one["loc"] for one in error.value.errors()] == [("prompt", "ids", 50_000)]


def test_89_threads_that_read_leave_the_interpreter_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the usual interval of 5 ms two of them keep /health waiting for 340 ms."""
    usual, seen = sys.getswitchinterval(), []

    class Served:
        def run(self, sockets: list[socket.socket]) -> None:
            seen.append(sys.getswitchinterval())

    monkeypatch.setattr(serve, "make", lambda *given: (Served(), None))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serve.run(mock.Mock(), ServerOptions(names=["a"]), listener)
    assert seen[0] <= 0.0005
    assert sys.getswitchinterval() == usual
