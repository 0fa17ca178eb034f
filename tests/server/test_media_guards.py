"""What clients' media may cost the others: threads, time, memory, and knowledge of each other's (cases by number)."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.running import Running, data_url, talk

CHAT = "/v1/chat/completions"


@pytest.fixture(autouse=True)
def _undisturbed(running: Running) -> Iterator[None]:
    """After every case the server is as before."""
    yield
    running.idle()


def asking(kind: str, url: str, **more: Any) -> dict[str, Any]:
    part = {"type": kind, kind: {"url": url}}
    return {"messages": [{"role": "user", "content": [part]}], "max_tokens": 1, **more}


def test_7_who_hangs_up_on_silent_servers_keeps_nobody_waiting(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BEHELD_ALLOW_PRIVATE_FETCH", "1")
    monkeypatch.setenv("BEHELD_VIDEO_FETCH_TIMEOUT", "20")
    choice = {"structured_outputs": {"choice": ["yes", "no"]}}
    small = {"messages": talk("x", data_url()), "max_tokens": 1}
    text = {"messages": talk("x"), "max_tokens": 4, **choice}
    # What is loaded at the first use is loaded.
    assert running.post(CHAT, small).status_code == 200
    assert running.post(CHAT, text).status_code == 200
    with socket.create_server(("127.0.0.1", 0), backlog=128) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/x"

        def ask(number: int) -> None:
            body = asking("video_url", url, **(choice if number % 2 else {}))
            with contextlib.suppress(httpx.TimeoutException):
                httpx.post(running.url + CHAT, json=body, timeout=1.0, trust_env=False)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(40)]
        for thread in threads:
            thread.start()
        time.sleep(0.6)
        begin = time.perf_counter()
        assert running.post(CHAT, small).status_code == 200
        assert running.post(CHAT, text).status_code == 200
        beside = time.perf_counter() - begin
        for thread in threads:
            thread.join()
        begin = time.perf_counter()
        running.idle()
        left = time.perf_counter() - begin
    assert beside < 3.0
    assert left < 3.0, "their fetches ended with them"


def test_57_two_keys_share_no_media(two_keys: Running) -> None:
    def seen(key: str, **more: Any) -> tuple[bool, int, str]:
        body = {"messages": talk("x", data_url(300, 200, seed=57)), "max_tokens": 1, **more}
        answer = two_keys.post(CHAT, body, headers={"Authorization": f"Bearer {key}"}).json()
        (media,) = answer["media"]
        return media["cached"], answer["usage"]["prompt_tokens_details"]["cached_tokens"], media["digest"]

    assert seen("key-one")[:2] == (False, 0)
    first = seen("key-one")
    assert first[0]
    assert first[1] > 0
    other = seen("key-two")
    assert other[:2] == (False, 0)
    assert other[2] != first[2], "embeddings are kept by this digest"
    assert seen("key-two")[0]
    assert not seen("key-two", cache_salt="mine")[0]
    assert seen("key-two", cache_salt="mine")[0]


@pytest.fixture(scope="module")
def two_keys() -> Iterator[Running]:
    """A server with two keys and pictures."""
    found = Running(api_keys=("key-one", "key-two"))
    yield found
    found.close()
