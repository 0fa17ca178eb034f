"""X-Request-Id of requests, where the operator lets them name their answers."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator

import pytest

from tests.server.running import Running

CHAT = "/v1/chat/completions"
ASKED = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}


@pytest.fixture(scope="module")
def naming() -> Iterator[Running]:
    running = Running(takes_request_ids=True)
    yield running
    running.close()


def test_every_route_gives_the_name_back(naming: Running, caplog: pytest.LogCaptureFixture) -> None:
    """Those that answer, those that refuse, one that does not exist, and both ways to /health."""
    paths = {route.path for route in naming.app.routes}  # type: ignore[attr-defined]
    assert {CHAT, "/v1/messages", "/v1/responses", "/health", "/metrics", "/tokenize", "/dashboard"} <= paths
    with caplog.at_level(logging.INFO, "beheld"):
        for number, path in enumerate([*sorted(paths), "/nothing", "/health?"]):
            name = {"X-Request-Id": f"mine-{number}"}
            for answer in (naming.get(path, headers=name), naming.post(path, ASKED, headers=name)):
                assert answer.headers.get_list("x-request-id") == [f"mine-{number}"], path
        streamed = naming.post(CHAT, ASKED | {"stream": True}, headers={"X-Request-Id": "stream-1"})
        # A stream is logged after its last bytes.
        naming.idle()
    assert streamed.headers["x-request-id"] == "stream-1"
    number = re.search(r'"id": ?"chatcmpl-([0-9a-f]{32})"', streamed.text)
    assert number is not None
    assert any(line.startswith(f"req-{number[1]} (stream-1) chat 200 ") for line in caplog.messages)


def test_an_error_has_the_name(naming: Running) -> None:
    answer = naming.post("/v1/messages", {"model": "tiny"}, headers={"X-Request-Id": "mine"})
    assert answer.status_code == 400
    assert answer.json()["request_id"] == "mine"


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "caf\xe9", "a\tb"])
def test_what_is_no_name_is_left(naming: Running, given: str, caplog: pytest.LogCaptureFixture) -> None:
    """Like a request without one."""
    with caplog.at_level(logging.INFO, "beheld"):
        answer = naming.post(CHAT, ASKED, headers={"X-Request-Id": given.encode("latin-1")})
    number = answer.headers["x-request-id"]
    assert re.fullmatch("[0-9a-f]{32}", number)
    assert answer.json()["id"] == f"chatcmpl-{number}"
    assert any(line.startswith(f"req-{number} chat 200 ") for line in caplog.messages)
    assert re.fullmatch("[0-9a-f]{32}", naming.get("/health").headers["x-request-id"])


def test_a_line_of_an_error_has_the_servers_own_name(
    naming: Running, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had the client's alone, which any number of requests may have."""

    async def fails(*_: object, **__: object) -> list[int]:
        raise ZeroDivisionError

    monkeypatch.setattr(naming.llm, "token_ids", fails)
    with caplog.at_level(logging.INFO, "beheld"):
        answer = naming.post("/tokenize", {"prompt": "x"}, headers={"X-Request-Id": "mine"})
    assert answer.status_code == 500
    assert "under mine," in answer.json()["error"]["message"]
    (error,) = [line for line in caplog.messages if "internal error" in line]
    (ended,) = [line for line in caplog.messages if " tokenize 500 " in line]
    assert re.match(r"req-[0-9a-f]{32} \(mine\) failed", error)
    assert error.split()[:2] == ended.split()[:2]
