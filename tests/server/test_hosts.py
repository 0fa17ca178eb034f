"""A page from anywhere cannot make itself this server's own by giving its name this machine's address."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

from beheld.server.hosts import HostGuard
from beheld.server.listen import is_own
from beheld.server.options import ServerOptions
from tests.server.running import Running, request_bytes

OWN = (
    *(
        "localhost",
        "localhost:8000",
        "LOCALHOST",
        "127.0.0.1",
        "127.0.0.1:8000",
        "[::1]",
        "[::1]:8000",
        "192.168.0.7:80",
    ),
    *("x", "my-machine:8000", "app.localhost", "localhost.", "", "[fe80::1%25eth0]"),
)
FOREIGN = (
    *("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "EVIL.example.", "a.b"),
    *("user@evil.example", "evil.example:80:80", "[::1].evil.example", "evil.example/..", "1.2.3.4.5", "0x7f.1"),
)


def status(name: str, **options: Any) -> int:
    app: Any = HostGuard(PlainTextResponse("in"), replace(ServerOptions(), **options))
    return TestClient(app).get("/v1/models", headers={"host": name}).status_code


@pytest.mark.parametrize("host", OWN)
def test_names_that_belong_to_nobody_outside_may_be_asked_for(host: str) -> None:
    assert status(host) == 200


@pytest.mark.parametrize("host", FOREIGN)
def test_names_that_a_stranger_can_own_may_not(host: str) -> None:
    assert status(host) == 400
    assert status(host, host="::1") == status(host, host="localhost") == 400


def test_what_the_operator_opens_is_open() -> None:
    assert status("llm.example:8000", allowed_hosts=("LLM.example",)) == 200
    assert status("evil.example", allowed_hosts=("llm.example",)) == 400
    # A page has no key of the server's; and whoever serves the network is asked under any name.
    assert status("evil.example", api_keys=("key",)) == 200
    assert status("evil.example", host="0.0.0.0") == 200
    assert [is_own(host) for host in ("127.0.0.2", "::1", "localhost", "0.0.0.0", "::", "host.example")] == [
        *(True, True, True, False, False, False)
    ]


def test_a_server_says_what_to_do(running: Running) -> None:
    answer = running.raw(request_bytes("/v1/completions", {"prompt": "x"}).replace(b"localhost", b"evil.example"))
    assert answer.startswith(b"HTTP/1.1 400")
    error = json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]
    assert error["code"] == "wrong_host"
    assert "--allowed-hosts" in error["remedy"]
    assert running.raw(b"GET /health HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n").startswith(
        b"HTTP/1.1 200"
    )
    running.idle()
