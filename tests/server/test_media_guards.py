"""What clients' media may cost the others: threads, time, memory, and knowledge of each other's (cases by number)."""

from __future__ import annotations

import argparse
import base64
import bisect
import contextlib
import itertools
import math
import random
import socket
import struct
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from beheld.cli import serve
from beheld.core.errors import ConfigError
from tests.long import sized
from tests.memory import resident_bytes
from tests.server.running import Running, data_url, received, request_bytes, talk

CHAT = "/v1/chat/completions"


@pytest.fixture(autouse=True)
def _undisturbed(running: Running) -> Iterator[None]:
    """After every case the server is as before."""
    yield
    running.idle()


def asking(kind: str, url: str, **more: Any) -> dict[str, Any]:
    part = {"type": kind, kind: {"url": url}}
    return {"messages": [{"role": "user", "content": [part]}], "max_tokens": 1, **more}


# ---------------------------------------------------------------------- addresses

SPELLINGS = """
localhost LOCALHOST localhost. 127.0.0.1 127.0.0.1. 127.1 127.0.1 127.0.0.2 127.255.255.254 0 0.0.0.0 0x0 00
0x7f000001 0x7F.1 0x7f.0x0.0x0.0x1 0177.0.0.1 0177.1 017700000001 2130706433 127.000.000.001 １２７.0.0.1 ①②⑦.0.0.1
127。0。0。1 10.0.0.1 10.255.255.255 0x0a000001 167772161 172.16.0.1 172.31.255.254 192.168.0.1 192.168.1.1 3232235777
169.254.169.254 0xA9FEA9FE 2852039166 0251.0376.0251.0376 100.64.0.1 100.100.100.200 192.0.0.8 192.0.2.1 192.88.99.1
198.18.0.1 198.51.100.1 203.0.113.1 224.0.0.1 239.255.255.255 240.0.0.1 255.255.255.255 [::] [::1] [0:0:0:0:0:0:0:1]
[::ffff:127.0.0.1] [::ffff:7f00:1] [::ffff:10.0.0.1] [::127.0.0.1] [64:ff9b::7f00:1] [64:ff9b:1::1] [2002:7f00:1::]
[2001::1] [2001:db8::1] [3fff::1] [5f00::1] [100::1] [2620:4f:8000::1] [fc00::1] [fd12:3456::1] [fe80::1] [fec0::1]
[ff02::1] [ff0e::1] [::1%25lo] user@127.0.0.1 a:b@127.0.0.1 example.test\\@127.0.0.1 127.0.0.1\\@example.test
"""
HOSTS = SPELLINGS.split()
# What is refused for how it is written, or because no resolver knows it; all others for where they lead.
WRITTEN = {
    "user@127.0.0.1": "user name",
    "a:b@127.0.0.1": "user name",
    "example.test\\@127.0.0.1": "backslashes",
    "127.0.0.1\\@example.test": "backslashes",
    "[::1%25lo]": "cannot be resolved",
}
_DIALLED: list[Any] = []
_WATCHED: set[int] = set()


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "socket.connect" and isinstance(arguments[1], tuple) and arguments[1][1] in _WATCHED:
        _DIALLED.append(arguments[1])


@pytest.fixture(scope="module")
def canary() -> Iterator[int]:
    """A port at which nobody may knock: here where it can be seen, elsewhere by what this process dials."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listening:
        listening.setblocking(False)
        port = listening.getsockname()[1]
        sys.addaudithook(_audit)
        _WATCHED.add(port)
        yield port
        _WATCHED.clear()
        with pytest.raises(BlockingIOError):
            listening.accept()
    assert not _DIALLED


@pytest.mark.parametrize("kind", ["image_url", "video_url", "audio_url"])
def test_1_none_of_many_spellings_leads_inside(running: Running, hearing: Running, canary: int, kind: str) -> None:
    """By both routes that take messages of such models, each within 100 ms; what else runs on the machine only adds to
    the time, so that a slow answer is asked for again."""
    assert len(HOSTS) > 60
    server = hearing if kind == "audio_url" else running

    def refused_s(path: str, host: str) -> float:
        body = {"messages": asking(kind, f"http://{host}:{canary}/x")["messages"]}
        begin = time.perf_counter()
        answer = client.post(path, json=body | ({"max_tokens": 1} if path == CHAT else {}))
        spent = time.perf_counter() - begin
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (422, "fetch_error"), (host, error)
        assert WRITTEN.get(host, "not public") in error["message"], (host, error)
        return spent

    with httpx.Client(base_url=server.url, timeout=30, trust_env=False) as client:
        for host, path in itertools.product(HOSTS, (CHAT, "/tokenize")):
            assert any(refused_s(path, host) < 0.1 for _ in range(5)), (host, path)
    assert not _DIALLED
    embedding = {"messages": asking(kind, f"http://127.0.0.1:{canary}/x")["messages"]}
    assert server.post("/v1/embeddings", embedding).status_code == 400
    server.idle()


def test_1_what_leads_inside_would_be_seen(running: Running, canary: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, of a server that may: it dials, and the watch sees it."""
    monkeypatch.setenv("BEHELD_ALLOW_PRIVATE_FETCH", "1")
    monkeypatch.setenv("BEHELD_IMAGE_FETCH_TIMEOUT", "0.3")
    with socket.create_server(("127.0.0.1", 0)) as other:
        _WATCHED.add(other.getsockname()[1])
        body = asking("image_url", f"http://127.1:{other.getsockname()[1]}/x")
        assert running.post(CHAT, body).status_code == 422
        assert _DIALLED.count(("127.0.0.1", other.getsockname()[1])) == len(_DIALLED) == 1
    _DIALLED.clear()


# ---------------------------------------------------------------------- time and memory


def bomb() -> bytes:
    """The case's own file: 13300 x 13300 pixels in 21 KB."""
    rows = zlib.compress(bytes((1 + 1663) * 13300), 9)
    pieces = [(b"IHDR", struct.pack(">IIBBBBB", 13300, 13300, 1, 0, 0, 0, 0)), (b"IDAT", rows), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in pieces
    )


def test_21_bombs_cost_nothing_and_keep_nobody_waiting(running: Running) -> None:
    """Sixteen at once are refused within 200 ms and 8 MiB, in the best of some rounds: what else runs on the machine
    only adds to the time. An ordinary picture beside them is answered."""
    data = request_bytes(CHAT, asking("image_url", "data:image/png;base64," + base64.b64encode(bomb()).decode()))
    small = {"messages": talk("x", data_url(seed=21)), "max_tokens": 1}
    assert running.post(CHAT, small).status_code == 200
    volley(running, data)
    spent, taken = zip(*(volley(running, data) for _ in range(8)), strict=True)
    assert min(spent) < 0.2, spent
    assert max(taken) <= 8 << 20, taken
    beside = threading.Thread(target=volley, args=(running, data))
    beside.start()
    assert running.post(CHAT, small).status_code == 200
    beside.join()


def volley(running: Running, data: bytes) -> tuple[float, int]:
    """Sixteen requests at once that are refused: seconds until all are, and bytes that the server has grown by."""
    links = [running.connect(30.0) for _ in range(16)]
    before, begin = resident_bytes(), time.perf_counter()
    try:
        for link in links:
            link.sendall(data)
        answers = [received(link) for link in links]
    finally:
        for link in links:
            link.close()
    spent = time.perf_counter() - begin
    assert {answer[:12] for answer in answers} == {b"HTTP/1.1 413"}
    return spent, resident_bytes() - before


@pytest.mark.case(27, 41)
def test_trusted_options_are_processed_where_that_can_be_killed() -> None:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)

    def decided(*flags: str) -> dict[str, Any]:
        arguments = parser.parse_args(["m", *flags])
        engine = serve.engine_options(arguments)
        options = serve.server_options(arguments, "m", engine)
        serve.kept_apart(options, engine)
        return engine

    assert "media_work" not in decided()
    assert decided("--media-workers", "0") == {"media_workers": 0}
    assert decided("--trust-request-mm-kwargs")["media_work"] == "process"
    assert decided("--trust-request-mm-kwargs", "--media-work", "auto")["media_work"] == "process"
    for flags in (("--media-work", "decode"), ("--media-workers", "0")):
        with pytest.raises(ConfigError, match="processes"):
            decided("--trust-request-mm-kwargs", *flags)


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


def test_57_the_same_names_under_two_keys_lead_to_nothing(two_keys: Running) -> None:
    """A name given to a picture and one given to a request are the client's own: under another key they find nothing,
    neither with the same picture nor with another."""

    def alone(key: str) -> int:
        part = {"type": "image_url", "image_url": None, "uuid": "shared"}
        body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 1}
        return two_keys.post(CHAT, body, headers={"Authorization": f"Bearer {key}"}).status_code

    def seen(key: str, seed: int) -> tuple[bool, int, str]:
        messages = talk("x", data_url(300, 200, seed=seed))
        messages[0]["content"][0]["uuid"] = "shared"
        names = {"Authorization": f"Bearer {key}", "X-Request-Id": "shared"}
        answer = two_keys.post(CHAT, {"messages": messages, "max_tokens": 1}, headers=names)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-request-id"] != "shared"
        (media,) = answer.json()["media"]
        assert media["given"]["uuid"] == "shared"
        return media["cached"], answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"], media["digest"]

    two_keys.llm.reset_prefix_cache()
    first = seen("key-one", 570)
    assert first[:2] == (False, 0)
    assert seen("key-one", 570)[0]
    assert (alone("key-one"), alone("key-two")) == (200, 400)
    same, other = seen("key-two", 570), seen("key-two", 571)
    assert same[:2] == (False, 0)
    assert not other[0]
    assert len({first[2], same[2], other[2]}) == 3


def test_57_times_tell_nothing_of_what_another_key_asked(two_keys: Running) -> None:
    """Prompts that another key's prompts filled the cache with take as long as prompts that nobody sent. Kolmogorov's
    and Smirnov's test; chance alone fails one round in a hundred, and three in a million."""
    assert any(cached_elsewhere_p(two_keys, "key-one", seed) > 0.01 for seed in range(3))


def test_57_what_the_own_key_asked_would_be_seen(two_keys: Running) -> None:
    assert cached_elsewhere_p(two_keys, "key-two", 9) < 0.01


def cached_elsewhere_p(server: Running, key: str, seed: int) -> float:
    """How likely the times of the second key's first tokens are, after `key` asked the same and after nobody did, if
    they come from one distribution. The order of both is drawn anew for every pair."""
    chance = random.Random(seed)
    took: dict[bool, list[float]] = {True: [], False: []}
    with httpx.Client(base_url=server.url, timeout=30, trust_env=False) as client:

        def first_token_s(name: str, ids: list[int]) -> float:
            body = {"prompt": ids, "max_tokens": 1}
            begin = time.perf_counter()
            answer = client.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {name}"})
            assert answer.status_code == 200
            return time.perf_counter() - begin

        for _ in range(sized(20, 400)):
            pair = {known: [chance.randrange(10, 250) for _ in range(1000)] for known in (True, False)}
            # Both times somebody asked just before, and a prompt of that length.
            first_token_s(key, pair[True])
            for known in chance.sample((True, False), 2):
                took[known].append(first_token_s("key-two", pair[known]))
    return same_distribution_p(took[True], took[False])


def same_distribution_p(one: list[float], other: list[float]) -> float:
    """Kolmogorov's and Smirnov's two-sided test by its limit, with Stephens' correction for small samples."""
    apart = max(
        abs(bisect.bisect_right(low, value) / len(low) - bisect.bisect_right(high, value) / len(high))
        for low, high in [(sorted(one), sorted(other))]
        for value in (*low, *high)
    )
    root = math.sqrt(len(one) * len(other) / (len(one) + len(other)))
    scaled = (root + 0.12 + 0.11 / root) * apart
    terms = (2 * (-1) ** (k - 1) * math.exp(-2 * (k * scaled) ** 2) for k in range(1, 101))
    return min(1.0, max(0.0, sum(terms))) if scaled > 0.2 else 1.0


def test_57_the_test_of_times_knows_equal_from_different() -> None:
    """By hand: sorted, 1 3 5 and 2 4 6 are a third apart at most; 200 of 400 that are ten beyond, nearly certain. The
    5 % point of the limit is 1.358."""
    chance = random.Random(1)
    one, alike = ([chance.random() for _ in range(300)] for _ in range(2))
    assert same_distribution_p(one, alike) > 0.05
    assert same_distribution_p(one, [value + 0.3 for value in alike]) < 1e-6
    assert same_distribution_p([1, 3, 5], [2, 4, 6]) > 0.9
    # 400 of each, apart by 38 of 400: 0.095 x (sqrt(200) + 0.12 + 0.008) = 1.356.
    low, high = [float(k) for k in range(400)], [float(k + 38) for k in range(400)]
    assert same_distribution_p(low, high) == pytest.approx(0.0506, abs=0.001)


@pytest.fixture(scope="module")
def two_keys() -> Iterator[Running]:
    """A server with two keys and pictures."""
    found = Running(api_keys=("key-one", "key-two"))
    yield found
    found.close()
