"""What must be refused is refused by name, at once, and changes nothing for anybody (cases by their number)."""

from __future__ import annotations

import base64
import contextlib
import gzip
import json
import select
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import pytest

from beheld.inputs.fetch import fetcher
from tests.long import sized
from tests.server.running import Running, data_url, received, request_bytes, talk
from tests.server.slowness import best, p99, slowness

CHAT = "/v1/chat/completions"
COMPLETE = "/v1/completions"


@pytest.fixture(autouse=True)
def _undisturbed(running: Running) -> Iterator[None]:
    """After every case the server is as before."""
    yield
    running.idle()


def refused(answer: httpx.Response, status: int, param: str | None = None) -> dict[str, Any]:
    error: dict[str, Any] = answer.json()["error"]
    assert answer.status_code == status, error
    assert "Traceback" not in error["message"]
    assert "/tmp" not in error["message"]
    assert error["remedy"], error
    if param is not None:
        assert error["param"] == param, error
    return error


NUMBERS: dict[str, list[Any]] = {
    "temperature": ["0.5", True, -0.1, 101, 10**400, None],
    "top_p": [0, 1.01, "1", False],
    "top_k": [-2, 1.5, "3", True],
    "min_p": [-0.1, 1.1],
    "n": [0, 9, 10**20, "1", True, 1.0],
    "max_tokens": [0, -1, 10**20, 1.5, "8", True],
    "min_tokens": [-1, True],
    "seed": [1.5, "1", True, 2**64, 10**25],
    "presence_penalty": [2.1, -2.1, True],
    "frequency_penalty": [2.1, "0"],
    "repetition_penalty": [0, -1, 101],
    "logprobs": [-1, 21, 10**9, 1.0],
    "prompt_logprobs": [-1, 21, True],
    "truncate_prompt_tokens": [0, -2, 1.5],
    "priority": [10**10, -(10**10), 1.5, "1"],
    "stop_token_ids": [[-1], ["1"], [True], [10**9], 5],
    "allowed_token_ids": [[], [-1], [10**9], ["a"]],
    "logit_bias": [{"-1": 1}, {"a": 1}, {"1": 101}, {"1": "2"}, {"999999": 1}, {"1": True}],
    "stop": [[""], [1], 5, ["x"] * 65],
}


# Chat's own names of the same, and what goes with them.
NUMBERS_OF_CHAT = {name: values for name, values in NUMBERS.items() if name != "logprobs"} | {
    "max_completion_tokens": NUMBERS["max_tokens"],
    "top_logprobs": NUMBERS["logprobs"],
}
BESIDE: dict[str, dict[str, Any]] = {"top_logprobs": {"logprobs": True}}


@pytest.mark.parametrize(
    ("path", "name"),
    [(COMPLETE, name) for name in sorted(NUMBERS)] + [(CHAT, name) for name in sorted(NUMBERS_OF_CHAT)],
)
def test_33_numbers_out_of_range_or_of_another_type(running: Running, path: str, name: str) -> None:
    asked: dict[str, Any] = {"prompt": "x"} if path == COMPLETE else {"messages": talk("x")}
    for value in (NUMBERS if path == COMPLETE else NUMBERS_OF_CHAT)[name]:
        if value is None:
            continue
        text = json.dumps({**asked, **BESIDE.get(name, {}), name: value})
        # Python's integer is read as a fraction that is too large for one.
        text = text.replace(str(10**400), "1e999")
        error = refused(running.post_text(path, text), 400)
        assert (error["param"] or "").split(".")[0] == name, (value, error)
        # Under the client's own name.
        assert name in error["message"], (value, error)


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity"])
def test_33_literals_that_json_lacks(running: Running, literal: str) -> None:
    answer = running.raw(request_bytes(COMPLETE, f'{{"prompt": "x", "temperature": {literal}}}'.encode()))
    assert answer.startswith(b"HTTP/1.1 400"), answer


def test_36_prompts_that_are_too_many_or_nothing(running: Running) -> None:
    begin = time.process_time()
    refused(running.post(COMPLETE, {"prompt": ["x"] * 1_000_000}), 400)
    refused(running.post(COMPLETE, {"prompt": ["x"] * 400_000}), 400, "prompt")
    assert time.process_time() - begin < 2.0
    for nothing in ("", [], [[]], [""]):
        refused(running.post(COMPLETE, {"prompt": nothing}), 400)
    for malformed in ([None], None, 5, {"a": 1}, [["x"]], [1, "x"], [True]):
        refused(running.post(COMPLETE, {"prompt": malformed}), 400)
    refused(running.post(COMPLETE, {"prompt": [5] * 2048, "max_tokens": 1}), 400)
    answer = running.post(COMPLETE, {"prompt": [5] * 2047, "max_tokens": 5})
    assert answer.json()["usage"] == {
        "prompt_tokens": 2047,
        "completion_tokens": 1,
        "total_tokens": 2048,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    refused(running.post(COMPLETE, {"prompt": [10**6], "max_tokens": 1}), 400)
    refused(running.post(CHAT, {"messages": []}), 400, "messages")


JSON_ABUSE: dict[str, tuple[bytes, bytes]] = {
    "deep": (b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", b"400"),
    "deep but within the parser's reach": (b'{"messages": ' + b"[" * 500 + b"]" * 500 + b"}", b"400"),
    "8 MiB in one text": (b'{"prompt": "' + b"x" * ((8 << 20) - 100) + b'"}', b"400"),
    "half a million keys": (b"{" + b",".join(b'"%d":1' % k for k in range(500_000)) + b"}", b"400"),
    "a million keys": (b"{" + b",".join(b'"%d":1' % k for k in range(1_000_000)) + b"}", b"413 400"),
    "key twice": (b'{"prompt": "x", "prompt": "y"}', b"400"),
    "5000 digits": (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", b"400"),
    "lone surrogate": (b'{"prompt": "\\ud800"}', b"400"),
    "byte order mark": (b'\xef\xbb\xbf{"prompt": "x"}', b"400"),
    "utf-16": ('{"prompt": "x"}'.encode("utf-16"), b"400"),
    "latin-1": (b'{"prompt": "\xe9"}', b"400"),
    "truncated": (b'{"prompt": "x"', b"400"),
    "two values": (b'{"prompt": "x"} {}', b"400"),
    "not an object": (b"[]", b"400"),
    "nothing": (b"", b"400"),
    "too large": (b'{"prompt": "' + b"x" * (9 << 20) + b'"}', b"413"),
}


@pytest.mark.parametrize("name", sorted(JSON_ABUSE))
def test_37_json_abuse(running: Running, name: str) -> None:
    """Each takes less than 200 ms of the processor, client and server together, in the best of some rounds."""
    body, statuses = JSON_ABUSE[name]

    def answered_s() -> float:
        begin = time.process_time()
        with running.connect() as link:
            try:
                link.sendall(request_bytes(COMPLETE, body))
            except ConnectionError:
                assert b"413" in statuses
            answer = received(link)
        if answer or b"413" not in statuses:
            assert answer.split(b" ", 2)[1] in statuses.split(), answer[:300]
        return time.process_time() - begin

    bound = 0.2 * slowness(time.thread_time)
    assert best(answered_s, bound) < bound


def test_37_a_long_text_is_measured_and_refused(running: Running) -> None:
    refused(running.post(COMPLETE, {"prompt": "x" * (4 << 20)}), 400)


def test_37_nul_is_a_character(running: Running) -> None:
    assert running.post(COMPLETE, {"prompt": "a\0b", "max_tokens": 1}).status_code == 200


@pytest.mark.case(30)
def test_37_other_encodings_and_types(running: Running) -> None:
    body = json.dumps({"prompt": "x"}).encode()
    json_type = {"content-type": "application/json"}
    headers = json_type | {"content-encoding": "gzip"}
    gzipped = running.request("POST", COMPLETE, content=gzip.compress(body), headers=headers)
    refused(gzipped, 415)
    for kind in ("text/plain", "multipart/form-data; boundary=x", "application/x-www-form-urlencoded"):
        refused(running.request("POST", COMPLETE, content=body, headers={"content-type": kind}), 415)
    refused(running.request("POST", COMPLETE, content=body), 415)


INTERNAL = {
    "kv_transfer_params": {"do_remote_prefill": True},
    "mm_hashes": ["0"],
    "media_io_kwargs": {"video": {"num_frames": 10**9}},
    "mm_processor_kwargs": {"code_revision": "x"},
    "chat_template": "{{ 1 }}",
    "lora_path": "/etc",
    "documents": [{"text": "x"}],
    "best_of": 2,
    "functions": [],
}


@pytest.mark.parametrize("name", sorted(INTERNAL))
def test_41_internal_and_unknown_fields_are_named(running: Running, name: str) -> None:
    error = refused(running.post(CHAT, {"messages": talk(), name: INTERNAL[name]}), 400, name)
    assert name in error["message"] or "not accept" in error["message"]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:,"}, "max_pixels": 10**9},
        {"type": "image_url", "image_url": {"url": "data:,", "path": "/etc/passwd"}},
        {"type": "image", "image": "data:,", "max_pixels": 10**9},
        {"type": "image", "image": {"path": "/etc/passwd"}},
        {"type": "image", "image": ["x"]},
        {"type": "video"},
        {"type": "text"},
        {"type": "text", "text": 5},
        {"type": "input_audio", "input_audio": "x"},
        {"text": "x", "image_url": {"url": "data:,"}},
        {"words": "x"},
        {"image_url": {"url": "data:,"}, "max_pixels": 10**9},
        "x",
        5,
        None,
    ],
)
def test_41_parts_of_unknown_kinds_or_with_options(running: Running, part: Any) -> None:
    refused(running.post(CHAT, {"messages": [{"role": "user", "content": [part]}]}), 400)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": "/etc/passwd"},
        {"type": "image", "image": "file:///etc/passwd"},
        {"image": "/etc/passwd"},
        {"image_url": {"url": "file:///etc/passwd"}},
        {"type": "image_pil", "image_pil": "x"},
        {"type": "input_image", "image_url": "/etc/passwd"},
        {"type": "video", "path": "/etc/passwd"},
        {"type": "input_video", "video_url": "/etc/passwd"},
    ],
)
def test_41_parts_of_any_name_read_no_files(running: Running, part: Any) -> None:
    error = refused(running.post(CHAT, {"messages": [{"role": "user", "content": [part]}]}), 422)
    assert "ocal files may not be read" in error["message"]


# ---------------------------------------------------------------------- media


class Asset(BaseHTTPRequestHandler):
    """Counts who asks."""

    hits = 0

    def do_GET(self) -> None:
        """Any path."""
        type(self).hits += 1
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def canary() -> Iterator[str]:
    """A server on loopback that nothing may ask."""
    server = HTTPServer(("127.0.0.1", 0), Asset)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/x.png"
    server.shutdown()
    thread.join()
    server.server_close()
    assert Asset.hits == 0


def test_8_too_many_items_are_refused_before_any_is_fetched(running: Running, canary: str) -> None:
    parts = [{"type": "image_url", "image_url": {"url": canary}}] * 1000
    error = refused(running.post(CHAT, {"messages": [{"role": "user", "content": parts}]}), 400)
    assert error["param"] == "messages.0.content.4.image_url"
    assert "1000" in error["message"]


def test_10_local_files_are_closed(running: Running) -> None:
    for path in ("/etc/passwd", "file:///etc/passwd", "../../etc/passwd", "/dev/zero", "ftp://x/y", "javascript:1"):
        error = refused(running.post(CHAT, {"messages": talk("x", path)}), 422)
        assert "root:" not in error["message"]


def test_11_addresses_in_text_are_text(running: Running, canary: str) -> None:
    text = f'![x]({canary}) <img src="{canary}"> {canary}'
    function = {"name": "look", "arguments": json.dumps({"url": canary, "text": text})}
    messages = [
        {"role": "system", "content": text},
        {"role": "user", "content": [{"type": "text", "text": text}], "name": "x"},
        {"role": "assistant", "content": text, "tool_calls": [{"id": "1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "1", "content": text},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": f"![x]({canary})"}]},
    ]
    assert running.post(CHAT, {"messages": messages, "max_tokens": 1}).status_code == 200
    assert Asset.hits == 0


PNG = data_url().split(",")[1]


@pytest.mark.parametrize(
    "url",
    [
        "data:image/png",
        "data:image/png;base64",
        "data:image/png;base64,",
        "data:image/png," + PNG,
        "data:image/png;base64," + PNG[:-3] + "$$$",
        "data:image/png;base64," + PNG[:100] + "\n" + PNG[100:],
        "data:image/png;base64," + PNG.rstrip("=") + "=====",
        "data:image/png;base64,%69%56",
        "data:image/png" + ";a=b" * 200 + ";base64," + PNG,
        "data:image/png;base64," + base64.b64encode(b"not a picture").decode(),
        "data:image/png;base64," + PNG[: len(PNG) // 8 * 4],
        "data:image/svg+xml;base64," + base64.b64encode(b"<svg xmlns='http://www.w3.org/2000/svg'/>").decode(),
    ],
)
def test_12_data_urls_are_read_strictly(running: Running, url: str) -> None:
    refused(running.post(CHAT, {"messages": talk("x", url), "max_tokens": 1}), 400)


def test_26_a_flood_of_frames_is_no_video(running: Running) -> None:
    """Frames one after the other in a data URL are a form that other servers read; here they are not base64."""
    begin = time.process_time()
    url = "data:video/jpeg;base64," + ",".join([PNG] * (5_000_000 // len(PNG)))
    part = {"type": "video_url", "video_url": {"url": url}}
    refused(running.post(CHAT, {"messages": [{"role": "user", "content": [part]}], "max_tokens": 1}), 400)
    assert time.process_time() - begin < 3.0


def test_9_hung_fetches_do_not_hold_up_text(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 requests wait for a server that says nothing, which only some of them may ask at a time. Text is answered as
    before meanwhile: the slowest of some takes no more than twice as long, in the best of some rounds."""
    monkeypatch.setenv("BEHELD_ALLOW_PRIVATE_FETCH", "1")
    monkeypatch.setenv("BEHELD_IMAGE_FETCH_TIMEOUT", "10")
    with socket.create_server(("127.0.0.1", 0), backlog=128) as silent:
        hung = request_bytes(
            CHAT, {"messages": talk("x", f"http://127.0.0.1:{silent.getsockname()[1]}/x.png"), "max_tokens": 1}
        )
        silent.setblocking(False)

        def text_s() -> float:
            begin = time.perf_counter()
            assert running.post(COMPLETE, {"prompt": "x", "max_tokens": 2}).status_code == 200
            return time.perf_counter() - begin

        def slower() -> float:
            """How many times as long the slowest of some texts takes, with and without those who hang."""
            calm = p99([text_s() for _ in range(20)])
            links = [running.connect() for _ in range(64)]
            try:
                for link in links:
                    link.sendall(hung)
                deadline = time.monotonic() + 5.0
                while running.admission.busy < 64 or not (asked := taken()):
                    assert time.monotonic() < deadline, "all were to be in work by now"
                    time.sleep(0.01)
                time.sleep(0.2)
                assert asked + taken() <= fetcher._MAX_PER_HOST
                beside = p99([text_s() for _ in range(20)])
                assert not select.select(links, [], [], 0)[0], "they were to hang by now"
            finally:
                for link in links:
                    link.close()
            running.idle()
            taken()
            return beside / calm

        def taken() -> int:
            """How many connections the silent server was given since it was last asked."""
            count = 0
            with contextlib.suppress(BlockingIOError):
                while True:
                    held.append(silent.accept()[0])
                    count += 1
            return count

        held: list[socket.socket] = []
        # What is loaded at the first use is loaded.
        running.post(CHAT, {"messages": talk("x", "http://[::]/")})
        text_s()
        assert best(slower, 2.0) <= 2.0
        monkeypatch.setenv("BEHELD_IMAGE_FETCH_TIMEOUT", "0.5")
        links = [running.connect() for _ in range(64)]
        for link in links:
            link.sendall(hung)
        answers = [received(link)[:12] for link in links]
        for link in (*links, *held):
            link.close()
    assert answers == [b"HTTP/1.1 422"] * 64


def test_53_markers_in_text_are_text(running: Running) -> None:
    def count(text: str) -> int:
        found: int = running.post("/tokenize", {"messages": talk(text)}).json()["count"]
        return found

    for marker in ("<|image_pad|>", "<|vision_start|>", "<|im_start|>system", "<|im_end|>", "<|endoftext|>"):
        answer = running.post(CHAT, {"messages": talk(f"a {marker} b"), "max_tokens": 1})
        assert answer.status_code == 200, answer.text
        assert count(marker) > count("")


# ---------------------------------------------------------------------- keys


PATHS = [
    "/",
    "/v1",
    "/none",
    "//health",
    "/health/",
    "/health/../v1/models",
    "/HEALTH",
    "/health%20",
    "/v1/models?x=/health",
]


def routes(running: Running) -> list[tuple[str, str]]:
    """(method, path) of every route there is."""
    return [
        (method, route.path.replace("{name:path}", "tiny").replace("{name}", "none"))
        for route in running.app.routes
        for method in sorted(route.methods - {"HEAD"})  # type: ignore[attr-defined]
    ]


def test_39_without_the_key_only_health_answers(locked: Running) -> None:
    for method, path in routes(locked):
        expected = 200 if path == "/health" else 401
        for given in (
            None,
            "Bearer wrong",
            "Bearer",
            "bearer",
            "Basic a2V5LW9uZQ==",
            "Bearer key-onekey-two",
            "key-one",
        ):
            headers = {} if given is None else {"Authorization": given}
            answer = locked.request(method, path, headers=headers, json={})
            assert answer.status_code == expected, (method, path, given)
            assert "key" not in answer.text or expected == 401
    for path in PATHS:
        for method in ("GET", "POST", "OPTIONS", "HEAD", "PUT", "TRACE"):
            raw = locked.raw(f"{method} {path} HTTP/1.1\r\nHost: /health\r\nConnection: close\r\n\r\n".encode())
            assert raw.startswith(b"HTTP/1.1 401"), (method, path, raw[:80])
    twice = (
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer key-one\r\nAuthorization: Bearer key-one\r\n\r\n"
    )
    assert locked.raw(twice, 1.0).startswith(b"HTTP/1.1 401")
    absolute = b"GET http://x/health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    assert locked.raw(absolute).startswith(b"HTTP/1.1 401")


def test_39_both_keys_open_it_in_both_ways(locked: Running) -> None:
    for key in ("key-one", "key-two"):
        for headers in ({"Authorization": f"Bearer {key}"}, {"Authorization": httpx.BasicAuth("x", key)._auth_header}):
            assert locked.get("/v1/models", headers=headers).json()["data"][0]["id"] == "tiny"


def test_57_two_keys_share_no_cached_prefix(locked: Running) -> None:
    def cached(key: str, **options: Any) -> int:
        body = {"prompt": list(range(100, 164)), "max_tokens": 1, **options}
        answer = locked.post(COMPLETE, body, headers={"Authorization": f"Bearer {key}"})
        found: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found

    assert cached("key-one") == 0
    assert cached("key-one") > 0
    assert cached("key-two") == 0
    assert cached("key-two", cache_salt="mine") == 0
    assert cached("key-two", cache_salt="mine") > 0


def test_78_labels_of_metrics_are_bounded(running: Running) -> None:
    def lines(first: int, count: int) -> int:
        for k in range(first, first + count):
            running.post(COMPLETE, {"prompt": "x", "model": f"m{k}", "user": f"u{k}"})
            running.get(f"/none/{k}")
        return len(running.get("/metrics").text.splitlines())

    lines(0, 1)
    running.get("/metrics")
    many = sized(50, 10_000)
    assert lines(1, many) == lines(1 + many, 1)


def test_78_every_stage_of_the_way_is_measured(running: Running) -> None:
    def seconds() -> dict[str, float]:
        lines = dict(line.rsplit(" ", 1) for line in running.get("/metrics").text.splitlines() if line[:1] != "#")
        names = [f'beheld_stage_seconds_sum{{stage="{stage}"}}' for stage in ("prepare", "queue", "prefill", "decode")]
        names += [
            f'beheld_media_stage_seconds_sum{{modality="image",stage="{stage}"}}'
            for stage in ("fetch", "decode", "process")
        ]
        names.append('beheld_media_stage_seconds_sum{modality="all",stage="encode"}')
        names += ['beheld_encode_seconds{engine="0"}', "beheld_event_loop_lag_seconds_sum"]
        return {name: float(lines.get(name, 0)) for name in names}

    before = seconds()
    body = {"messages": talk("x", data_url(300, 200, seed=time.time_ns() % 10**6)), "max_tokens": 20}
    assert running.post(CHAT, body | {"ignore_eos": True}).status_code == 200
    after = seconds()
    for name in before:
        assert after[name] > before[name] or "lag" in name, name


def test_embeddings_are_checked_before_they_are_refused(running: Running) -> None:
    for body, param in (
        ({"input": []}, "input"),
        ({"input": [[]]}, None),
        ({"input": ""}, "input"),
        ({}, "input"),
        ({"input": "x", "messages": talk()}, "input"),
        ({"input": "x", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "x", "dimensions": 0}, "dimensions"),
        ({"input": 5}, None),
    ):
        refused(running.post("/v1/embeddings", body), 400, param)
    with running.connect():
        error = refused(running.post("/v1/embeddings", {"input": [[1, 2]], "encoding_format": "base64"}), 400)
    assert error["code"] == "not_an_embedding_model"
    assert "/v1/chat/completions" in error["remedy"]
    assert "--runner pooling" in error["remedy"]
