"""POST /invocations of a model that generates, and its sessions; tests/pool/test_server.py has that of vectors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from beheld.server import sagemaker_sessions
from tests.server.running import Running, talk


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/chat/completions", {"messages": talk("One")}), ("/v1/completions", {"prompt": ["One", "Two"]})],
)
def test_the_body_says_which_route_answers(running: Running, path: str, body: dict[str, Any]) -> None:
    body = body | {"max_tokens": 4, "temperature": 0}
    plain, found = running.post(path, body).json(), running.post("/invocations", body).json()
    assert (plain["object"], plain["choices"]) == (found["object"], found["choices"])
    streamed = running.post("/invocations", body | {"stream": True})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert streamed.text.rstrip().endswith("data: [DONE]")


def test_the_header_names_the_adapter(running: Running) -> None:
    def ask(adapter: str) -> httpx.Response:
        body = {"prompt": "x", "max_tokens": 1, "model": "tiny"}
        headers = {"X-Amzn-SageMaker-Adapter-Identifier": adapter}
        return httpx.post(running.url + "/invocations", json=body, headers=headers, trust_env=False)

    assert ask("tiny").status_code == 200
    refused = ask("none")
    assert (refused.status_code, refused.json()["error"]["param"]) == (404, "model")


@pytest.mark.parametrize("body", [{"input": "x"}, {"query": "x", "documents": ["y"]}, {}])
def test_a_body_of_no_route_is_refused(running: Running, body: dict[str, Any]) -> None:
    refused = running.post("/invocations", body)
    assert refused.status_code == 400
    assert "messages or a prompt" in refused.json()["error"]["remedy"]


def test_counters_name_the_route_that_answers(running: Running) -> None:
    running.post("/invocations", {"prompt": "x", "max_tokens": 1})
    assert 'route="invoke"' in running.get("/metrics").text


SESSION = "X-Amzn-SageMaker-Session-Id"


@pytest.fixture(scope="module")
def stateful() -> Iterator[Running]:
    made = Running(sagemaker_sessions=True)
    yield made
    made.close()


def session(run: Running, kind: str, name: str | None = None, **more: Any) -> httpx.Response:
    return run.post("/invocations", {"requestType": kind, **more}, headers={} if name is None else {SESSION: name})


def test_a_session_begins_and_ends(stateful: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = session(stateful, "NEW_SESSION")
    name, _, until = begun.headers["X-Amzn-SageMaker-New-Session-Id"].partition(";")
    assert (begun.status_code, until.strip()[:8]) == (200, "Expires=")
    body = {"prompt": "x", "max_tokens": 1}
    assert stateful.post("/invocations", body, headers={SESSION: name}).status_code == 200
    without = session(stateful, "CLOSE")
    assert (without.status_code, "invalid session_id" in without.json()["error"]["message"]) == (424, True)
    assert session(stateful, "CLOSE", name, extra=1).status_code == 400
    ended = session(stateful, "CLOSE", name)
    assert (ended.status_code, ended.headers["X-Amzn-SageMaker-Closed-Session-Id"]) == (200, name)
    again = session(stateful, "CLOSE", name)
    assert (again.status_code, "session not found" in again.json()["error"]["message"]) == (400, True)
    monkeypatch.setattr(sagemaker_sessions, "_MOST", 1)
    old = session(stateful, "NEW_SESSION").headers["X-Amzn-SageMaker-New-Session-Id"].partition(";")[0]
    session(stateful, "NEW_SESSION")
    assert session(stateful, "CLOSE", old).status_code == 400


def test_sessions_are_off(running: Running) -> None:
    refused = session(running, "NEW_SESSION")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "requestType")
