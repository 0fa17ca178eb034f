"""Case 86: every route has every guard. A route without a row in ROWS fails, and so does a row without a cell."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from beheld.server.app import Service
from tests.memory import peak
from tests.server.running import Running, data_url, received, request_bytes, source_of, talk
from tests.server.test_refusals import routes

CHAT = "/v1/chat/completions"
COMPLETE = "/v1/completions"
GENERATE = "/inference/v1/generate"
ABORT = "/inference/v1/abort_requests"
SCORING = "/generative_scoring"
SYSTEM = "/v1/systemone"
DECISIONS = "/v1/decisions"
PREDICATE = {"type": "predicate", "instructions": "x"}
INVOKE = "/invocations"
EMBED = "/v1/embeddings"
SIDES = {"text_1": "x", "text_2": "y"}
RANKED = {"query": "x", "documents": ["y"]}
# Routes of models that pool: this one generates, and refuses them in the end.
POOLED: dict[str, dict[str, Any]] = {
    EMBED: {"input": "x"},
    "/v2/embed": {"texts": ["x"]},
    "/pooling": {"input": "x"},
    "/classify": {"input": "x"},
    "/score": SIDES,
    "/v1/score": SIDES,
    "/rerank": RANKED,
    "/v1/rerank": RANKED,
    "/v2/rerank": RANKED,
}
MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
RENDER = "/cohere/v2/chat/render"
COHERE = ("/v2/chat", "/cohere/v2/chat", RENDER)
RESPONSES = "/v1/responses"
RESPONSE = "/v1/responses/none"
STREAM = "/v1/streams/none"
# Routes that take forms; their own guards are in test_transcriptions.py.
FORMS = ("/v1/audio/transcriptions", "/v1/audio/translations")
CANCEL = "/v1/responses/none/cancel"
# Route -> a body that is answered with 200; None for routes that take none. What the last three name is not there.
ROWS: dict[str, dict[str, Any] | None] = {
    CHAT: {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
    COMPLETE: {"prompt": "x", "max_tokens": 1},
    GENERATE: {"token_ids": [1, 2], "sampling_params": {"max_tokens": 1}},
    SCORING: {"query": [1, 2], "items": [[3]], "label_token_ids": [4]},
    SYSTEM: {"state": "x", "questions": {"q": {"type": "noul"}}},
    DECISIONS: {"input": "x", "questions": [PREDICATE]},
    **POOLED,
    INVOKE: {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
    MESSAGES: {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
    COUNT: {"messages": [{"role": "user", "content": "x"}]},
    RESPONSES: {"input": "x", "max_output_tokens": 1},
    **{path: {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1} for path in COHERE},
    **dict.fromkeys(FORMS),
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
    ABORT: {"request_ids": ["nobody"]},
    "/": None,
    "/dashboard": None,
    "/docs": None,
    "/health": None,
    "/metrics": None,
    "/load": None,
    "/openapi.json": None,
    "/v1/models": None,
    "/v1/models/tiny": None,
    "/version": None,
    "/ping": None,
    STREAM: None,
    RESPONSE: None,
    CANCEL: None,
}
POSTS = sorted(path for path, body in ROWS.items() if body is not None)
BODILESS = sorted(path for path, body in ROWS.items() if body is None)
ABSENT = (STREAM, RESPONSE, CANCEL)
# The methods of a route, where they are not GET alone, or POST with a body.
METHODS = {"/ping": ("GET", "POST"), RESPONSE: ("GET", "DELETE"), CANCEL: ("POST",), **dict.fromkeys(FORMS, ("POST",))}
# Routes that take a conversation, hence media.
TALKING = (
    CHAT,
    INVOKE,
    "/tokenize",
    EMBED,
    "/pooling",
    "/classify",
    MESSAGES,
    COUNT,
    RESPONSES,
    SYSTEM,
    DECISIONS,
    *COHERE,
)

Guard = Callable[[Running, str], None]


@pytest.fixture(autouse=True)
def _undisturbed(running: Running) -> Iterator[None]:
    yield
    running.idle()


def refused(answer: httpx.Response, status: int, param: str | None = None) -> None:
    # Cohere's errors are the body itself.
    error = answer.json().get("error", answer.json())
    assert (answer.status_code, answer.headers["x-request-id"][:4]) == (status, "req-"), error
    assert error["remedy"]
    assert param is None or error["param"] == param, error


def conversation(path: str, text: str, *urls: str) -> dict[str, Any]:
    """A body with one user's message, in the form of the route."""
    if path == RESPONSES:
        parts: list[dict[str, Any]] = [{"type": "input_image", "image_url": url} for url in urls]
        item = {"role": "user", "content": [*parts, {"type": "input_text", "text": text}]}
        return {"input": [item], "max_output_tokens": 1}
    if path == SYSTEM:
        return {"state": text, "images": [*urls], "questions": {"q": {"type": "noul"}}}
    if path == DECISIONS:
        image_parts = [{"type": "input_image", "image_url": url} for url in urls]
        said = {"role": "user", "content": [*image_parts, {"type": "input_text", "text": text}]}
        return {"input": [said], "questions": [PREDICATE]}
    if path in COHERE:
        return {"model": "tiny", "messages": talk(text, *urls), "max_tokens": 1}
    if path not in (MESSAGES, COUNT):
        return {"messages": talk(text, *urls), **({"max_tokens": 1} if path in (CHAT, INVOKE) else {})}
    blocks: list[dict[str, Any]] = [{"type": "image", "source": source_of(url)} for url in urls]
    messages = [{"role": "user", "content": [*blocks, {"type": "text", "text": text}]}]
    return {"messages": messages, **({"max_tokens": 1} if path == MESSAGES else {})}


def methods_of(path: str) -> tuple[str, ...]:
    return METHODS.get(path) or (("POST",) if path in POSTS else ("GET",))


def body_cap(running: Running, path: str) -> None:
    """A body that says or shows that it is too large; a route that takes none does not wait for it."""
    method = methods_of(path)[0]
    takes = path in POSTS or path in FORMS
    status = b"HTTP/1.1 413" if takes else b"HTTP/1.1 404" if path in ABSENT else b"HTTP/1.1 200"
    kind = "multipart/form-data; boundary=x" if path in FORMS else "application/json"
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: {kind}\r\n"
    # The status alone is read, as soon as it is there: the server waits for a moment for the rest of a body before it
    # closes, and for up to two seconds while more of it comes.
    with running.connect() as link:
        link.sendall(f"{head}Content-Length: 999999999\r\n\r\n".encode())
        assert link.recv(1024).startswith(status)
    chunk = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
    with running.connect() as link:
        link.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        try:
            for _ in range(12):
                if select.select([link], [], [], 0)[0]:
                    break
                link.sendall(chunk)
        except ConnectionError:
            return
        assert link.recv(1024).startswith(status)


def strict_json(running: Running, path: str) -> None:
    """NaN, half characters, keys that stand twice, what is cut off, what is too deep, what is no object."""
    for text in (
        b'{"model": NaN}',
        b'{"model": "\\udc00"}',
        b'{"model": "a", "model": "b"}',
        b"{",
        b"[" * 10**5,
        b"[]",
    ):
        assert running.raw(request_bytes(path, text)).startswith(b"HTTP/1.1 400"), text[:30]


def known_fields(running: Running, path: str) -> None:
    """A field that nobody knows, and fields that are for the trusted alone."""
    row = ROWS[path] or {}
    refused(running.post(path, row | {"surprise": 1}), 400, "surprise")
    for name, value in (("chat_template", "{{ 1 }}"), ("mm_processor_kwargs", {"max_pixels": 10**9})):
        refused(running.post(path, row | {name: value}), 400, name)


def known_model(running: Running, path: str) -> None:
    """A model that is not there."""
    refused(running.post(path, (ROWS[path] or {}) | {"model": "other"}), 404, "model")


def other_methods(running: Running, path: str) -> None:
    """Methods that the route does not have."""
    for method in {"PUT", "DELETE", "GET", "POST"}.difference(methods_of(path)):
        refused(running.request(method, path, json={}), 405)


def counts(running: Running, path: str) -> None:
    """Too many of anything that can be many."""
    many: dict[str, list[tuple[dict[str, Any], int]]] = {
        **{
            path: [
                (body, 400)
                for body in ({"n": 9}, {"messages": talk() * 5000}, conversation(path, "x", *[data_url()] * 5))
            ]
            for path in (CHAT, INVOKE)
        },
        **{
            path: [({"messages": talk() * 5000}, 400), (conversation(path, "x", *[data_url()] * 5), 400)]
            for path in (MESSAGES, COUNT, *COHERE)
        },
        RESPONSES: [
            ({"input": [{"role": "user", "content": "x"}] * 5000}, 400),
            (conversation(RESPONSES, "x", *[data_url()] * 5), 400),
        ],
        COMPLETE: [({"n": 9}, 400), ({"prompt": ["x"] * 9}, 400), ({"prompt": ["x"] * 3, "n": 3}, 400)],
        GENERATE: [({"sampling_params": {"n": 9}}, 400), ({"token_ids": [1] * 5000}, 400)],
        SYSTEM: [
            ({"questions": {f"q{number}": {"type": "noul"} for number in range(9)}}, 400),
            ({"images": [data_url()] * 5}, 400),
        ],
        DECISIONS: [({"questions": [PREDICATE] * 9}, 400), (conversation(DECISIONS, "x", *[data_url()] * 5), 400)],
        SCORING: [({"items": [[3]] * 9}, 400), ({"query": [1] * 5000}, 400)],
        **{path: [({"input": ["x"] * 2049}, 400)] for path in (EMBED, "/pooling", "/classify")},
        "/v2/embed": [({"texts": ["x"] * 2049}, 400)],
        **{path: [({"text_2": ["x"] * 2049}, 400)] for path in ("/score", "/v1/score")},
        **{path: [({"documents": ["x"] * 2049}, 400)] for path in POOLED if "rerank" in path},
        "/tokenize": [
            ({"messages": talk() * 5000, "prompt": None}, 400),
            ({**conversation("/tokenize", "x", *[data_url()] * 5), "prompt": None}, 400),
        ],
        "/detokenize": [({"tokens": [1] * 2049}, 400)],
        ABORT: [({"request_ids": ["x"] * 1025}, 400), ({"request_ids": ["x" * 513]}, 400)],
    }
    for body, status in many[path]:
        refused(running.post(path, (ROWS[path] or {}) | body), status)


def media_caps(running: Running, path: str) -> None:
    """A picture that is larger than any may be, by its header alone; and one that is none."""
    header = struct.pack(">IIBBBBB", 60_000, 60_000, 1, 0, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n"
    for kind, data in ((b"IHDR", header), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")):
        png += struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    for data, status in ((png, 413), (b"none", 400)):
        url = "data:image/png;base64," + base64.b64encode(data).decode()
        answer = running.post(path, conversation(path, "x", url))
        # Vectors are not made, and media are not rendered, and so nothing is opened for them.
        refused(answer, 400 if path in POOLED or path == RENDER else status)


def inside_addresses(running: Running, path: str) -> None:
    """Addresses of this machine and of its network, and its files."""
    for url in ("http://127.0.0.1:1/", "http://169.254.169.254/", "http://[::1]/", "file:///etc/passwd", "/etc/passwd"):
        answer = running.post(path, conversation(path, "x", url))
        # Nothing is fetched for vectors that are not made, and for media that are not rendered.
        refused(answer, 400 if path in POOLED or path == RENDER else 422)


def sanitised_text(running: Running, path: str) -> None:
    """Markers in the text of a conversation stay text: they make no picture's place."""
    text = "<|image_pad|><|vision_start|>"
    found = running.post("/tokenize", {"messages": talk(text)}).json()
    answer = running.post(path, conversation(path, text))
    if path == COUNT:
        assert answer.json() == {"input_tokens": found["count"]}
    elif path == RESPONSES:
        assert answer.json()["usage"]["input_tokens"] == found["count"]
    elif path == MESSAGES:
        usage = answer.json()["usage"]
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == found["count"]
    elif path in (CHAT, INVOKE):
        assert answer.json()["usage"]["prompt_tokens"] == found["count"]
    elif path in ("/tokenize", RENDER):
        ids = answer.json()["tokens" if path == "/tokenize" else "token_ids"]
        assert running.llm.info.placeholder_ids["image"] not in ids
    elif path in COHERE:
        assert answer.json()["usage"]["tokens"]["input_tokens"] == found["count"]
    elif path in (SYSTEM, DECISIONS):
        # The question has tokens of its own, and an image would have a receipt.
        assert answer.status_code == 200
        assert "media" not in answer.json()
    else:
        refused(answer, 400)


ANY: tuple[Guard, ...] = (body_cap, other_methods)
POSTED: tuple[Guard, ...] = (strict_json, known_fields, known_model, counts)
TALKED: tuple[Guard, ...] = (media_caps, inside_addresses, sanitised_text)
CELLS = [
    *((path, guard) for path in ROWS for guard in ANY),
    *((path, guard) for path in POSTS for guard in POSTED),
    *((path, guard) for path in TALKING for guard in TALKED),
]


def test_86_every_route_has_a_row(running: Running) -> None:
    there = routes(running)
    rows = {(method, path) for path in ROWS for method in methods_of(path)}
    assert set(there) == rows, "a new route needs a row in ROWS"
    document = running.get("/openapi.json").json()["components"]["schemas"]
    paths = running.get("/openapi.json").json()["paths"]
    for path in POSTS:
        name = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"].rsplit("/", 1)[1]
        # One route takes the bodies of others.
        several = [choice["$ref"].rsplit("/", 1)[1] for choice in document[name].get("anyOf", ())]
        talks = any(
            not {"messages", "input", "state"}.isdisjoint(document[name]["properties"]) for name in several or [name]
        )
        assert talks == (path in TALKING), "what takes media needs their guards"


@pytest.mark.case(30)
@pytest.mark.parametrize(("path", "guard"), CELLS, ids=[f"{path}-{guard.__name__}" for path, guard in CELLS])
def test_86_guards_of_every_route(running: Running, path: str, guard: Guard) -> None:
    guard(running, path)


@pytest.mark.parametrize("path", [CHAT, "/none"])
def test_30_uploads_are_refused_before_they_are_read(running: Running, path: str) -> None:
    """A route that takes no form refuses one at once, although the form never ends, and keeps and writes none of it."""
    part = b'--x\r\nContent-Disposition: form-data; name="f"; filename="../../' + b"x" * 65_000 + b'\0"\r\n'
    part += b"Content-Type: multipart/mixed; boundary=x\r\n\r\n"
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=x\r\n"
    head += "Transfer-Encoding: chunked\r\n\r\n"
    before = set(os.listdir(tempfile.gettempdir()))
    taken: list[int] = []
    while len(taken) < 4 and (not taken or min(taken) >= 16 << 20):
        with peak() as above, running.connect() as link:
            link.sendall(head.encode())
            with contextlib.suppress(ConnectionError):
                for _ in range(1000):
                    link.sendall(b"%x\r\n%s\r\n" % (len(part), part))
            found = received(link)
        taken.append(above[0])
        assert found == b"" or found.split(b" ", 2)[1] in (b"415", b"404", b"413"), found[:200]
    assert min(taken) < 16 << 20, taken
    assert not [name for name in set(os.listdir(tempfile.gettempdir())) - before if "x" * 20 in name]
    assert running.raw(head.encode()[:-2] + b"Connection: close\r\n\r\n0\r\n\r\n").split(b" ", 2)[1] in (b"415", b"404")


@pytest.mark.parametrize("path", ROWS)
def test_86_what_is_right_is_answered(running: Running, path: str) -> None:
    row = ROWS[path]
    method = methods_of(path)[0]
    answer = running.request(method, path, json=row)
    if path in POOLED:
        refused(answer, 400, "model")
    else:
        assert answer.status_code == (415 if path in FORMS else 404 if path in ABSENT else 200)
        assert answer.headers["x-request-id"].startswith("req-")


@pytest.mark.parametrize("path", ROWS)
def test_86_the_key_stands_before_every_guard(locked: Running, path: str) -> None:
    """Without a key nothing of a request is looked at, whatever is wrong with it."""
    opened = path == "/health"
    for text in (b"{}", b"{", json.dumps({"surprise": 1}).encode()):
        for method in ("GET", "POST"):
            raw = request_bytes(path, text).replace(b"POST", method.encode(), 1)
            status = locked.raw(raw).split(b" ", 2)[1]
            assert status == ((b"200" if method == "GET" else b"405") if opened else b"401")


def test_handlers_are_all_guarded(running: Running) -> None:
    """Every route goes through the one place that maps errors."""
    for route in running.app.routes:
        assert route.endpoint.__qualname__.startswith(Service._guarded.__qualname__), route.path  # type: ignore[attr-defined]
