"""POST /invocations of a model that generates; tests/pool/test_server.py has that of vectors."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

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
