"""Small requests of half a million values, and what answers repeat of requests (case 136)."""

from __future__ import annotations

import json
import threading
import time
import weakref
from typing import Any

import pytest

from beheld.core.errors import ParamsError
from beheld.core.structured_outputs import StructuredOutputs
from beheld.server import app, chat_messages, limits
from beheld.server.response_events import ResponseEvents
from beheld.server.response_store import ResponseStore
from beheld.server.schema import ChatRequest
from beheld.structured import compile
from beheld.structured.compile import MAX_TEXT, grammar_of
from beheld.utils.bounded_json import exceeds
from beheld.utils.part_fields import PartFields
from tests.server.running import SMALL, Running, received, request_bytes, watched
from tests.server.slowness import best, longest_wait, slowness

pytestmark = pytest.mark.case(136)

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
SAID: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
TALK: dict[str, Any] = {"input": "a", "max_output_tokens": 1}


def function(name: str, values: int) -> dict[str, Any]:
    return {"name": name, "parameters": {"type": "object", "properties": {"a": {"enum": [0] * values}}}}


def tools(count: int, values: int) -> list[dict[str, Any]]:
    return [{"type": "function", "function": function(f"f{number}", values)} for number in range(count)]


def flat(count: int, values: int) -> list[dict[str, Any]]:
    """The same for /v1/responses."""
    return [{"type": "function", **function(f"f{number}", values)} for number in range(count)]


def anthropic(count: int, values: int) -> list[dict[str, Any]]:
    return [{"name": f"f{n}", "input_schema": function("a", values)["parameters"]} for n in range(count)]


def formed(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


PARTS = [{"role": "user", "content": [{"type": "text", "text": "a"}] * 2000}] * 12
MANY, LONG = {"enum": [0] * 500_000}, {"description": "x" * (7 << 20)}
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "parts": (CHAT, {**SAID, "messages": PARTS}),
    "parts to count": ("/tokenize", {"messages": PARTS, "tools": tools(128, 3000)}),
    "tools": (CHAT, {**SAID, "tools": tools(128, 4000), "tool_choice": "none"}),
    "tools that must be called": (CHAT, {**SAID, "tools": tools(128, 4000), "tool_choice": "required"}),
    "long tools": (CHAT, {**SAID, "tools": [{"type": "function", "function": {"name": "f", "parameters": LONG}}]}),
    "tools of responses": (RESPONSES, {**TALK, "tools": flat(128, 4000)}),
    "tools of messages": ("/v1/messages", {**SAID, "tools": anthropic(128, 4000)}),
    "schema": (CHAT, {**SAID, "response_format": formed(MANY)}),
    "long schema": (CHAT, {**SAID, "response_format": formed(LONG)}),
    "schema of responses": (
        RESPONSES,
        {**TALK, "text": {"format": {"type": "json_schema", "name": "a", "schema": MANY}}},
    ),
    "structured": (CHAT, {**SAID, "structured_outputs": {"json": MANY}}),
    "choices": (CHAT, {**SAID, "structured_outputs": {"choice": ["x" * (7 << 10)] * 1000}}),
    "long schema of responses": (
        RESPONSES,
        {**TALK, "background": True, "text": {"format": {"type": "json_schema", "name": "a", "schema": LONG}}},
    ),
    "schema of responses that nobody waits for": (
        RESPONSES,
        {**TALK, "background": True, "text": {"format": {"type": "json_schema", "name": "a", "schema": MANY}}},
    ),
    "instructions": (RESPONSES, {**TALK, "background": True, "instructions": "\0" * ((1 << 20) + 1)}),
    "metadata": (RESPONSES, {**TALK, "metadata": {"a": "x" * (7 << 20)}}),
    "many metadata": (RESPONSES, {**TALK, "metadata": {f"k{number}": "1" for number in range(40_000)}}),
}


def keeps_nobody_waiting(running: Running, sent: bytes, status: int) -> None:
    """Assert that an answer has this status, and that the loop is late by no more than others notice."""

    def late_s() -> float:
        with watched(running) as late:
            answer = running.raw(sent, 20.0)
            assert answer.startswith(b"HTTP/1.1 %d" % status), answer[:500]
            # Its end, too, in which the body is dropped.
            time.sleep(0.05)
        return max(late)

    bound = 0.05 * slowness()
    assert best(late_s, bound) < bound


@pytest.mark.parametrize("what", REFUSED)
def test_136_many_values_are_refused_and_keep_nobody_waiting(running: Running, what: str) -> None:
    path, body = REFUSED[what]
    keeps_nobody_waiting(running, request_bytes(path, body), 400)
    running.idle()


LARGE = [{"role": "user", "content": [{"type": "text", "text": "a"}] * 200}]
PLANNED: dict[str, tuple[str, dict[str, Any], str]] = {
    "chat": (CHAT, {"messages": LARGE, "max_tokens": 1, "truncate_prompt_tokens": 8}, "order_of"),
    "message": ("/v1/messages", {"messages": LARGE, "max_tokens": 1}, "order_of"),
    "response": (
        RESPONSES,
        {
            "input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}] * 200}],
            "max_output_tokens": 1,
            "truncate_prompt_tokens": 8,
        },
        "order_of",
    ),
    "tokens": ("/tokenize", {"messages": LARGE}, "tokenize_options"),
    "tokens of a message": ("/v1/messages/count_tokens", {"messages": LARGE}, "tokenize_options"),
}


@pytest.mark.parametrize("what", PLANNED)
def test_136_what_is_asked_of_the_engine_for_a_large_chat_is_made_in_a_thread(
    running: Running, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    path, body, name = PLANNED[what]
    real, threads = getattr(app, name), list[str]()

    def made(*given: Any) -> Any:
        threads.append(threading.current_thread().name)
        return real(*given)

    monkeypatch.setattr(app, name, made)
    answer = running.post(path, body)
    assert answer.status_code == 200, answer.text
    assert len(threads) == 1
    assert threads[0].startswith("beheld-read"), threads


def test_136_messages_are_let_go_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """To free tens of thousands of parts in one step kept the interpreter for 40 ms."""
    sent = [{"role": "user", "content": [{"type": "text", "text": "a"}]}] * 6
    given = ChatRequest.model_validate({"messages": sent}).messages
    left = [weakref.ref(message) for message in given]
    real, counts = chat_messages.message_of, list[int]()

    def counted(*arguments: Any) -> Any:
        counts.append(sum(one() is not None for one in left))
        return real(*arguments)

    monkeypatch.setattr(chat_messages, "message_of", counted)
    made = chat_messages.turned(given, SMALL, PartFields(None))
    assert len(made) == 6
    assert counts == [6, 5, 4, 3, 2, 1]
    assert not given


def test_136_as_many_as_may_be_are_taken(running: Running) -> None:
    most = limits.MAX_TOOLS_VALUES // limits.MAX_TOOLS - 20
    assert running.post(CHAT, {**SAID, "tools": tools(128, most), "tool_choice": "none"}).status_code == 200
    metadata = {f"{number:03d}": "x" * limits.MAX_METADATA_LETTERS for number in range(limits.MAX_METADATA)}
    answer = running.post(RESPONSES, {**TALK, "metadata": metadata, "tools": flat(128, most), "tool_choice": "none"})
    assert answer.status_code == 200
    assert answer.json()["metadata"] == metadata
    for more in ({**metadata, "more": ""}, {"a": "x" * (limits.MAX_METADATA_LETTERS + 1)}):
        refused = running.post(RESPONSES, {**TALK, "metadata": more})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"].startswith("metadata")
    words = running.post(CHAT, {**SAID, "tools": tools(128, 300), "tool_choice": "none"}).json()["error"]
    assert words["param"] == "tools"
    assert "The tools have more than" in words["message"]


def test_136_what_responses_repeat_is_written_at_turns(running: Running) -> None:
    """Sixteen clients at once, whose streams repeat a mebibyte three times."""
    body = {**TALK, "stream": True, "tools": flat(16, 1900), "tool_choice": "none"}
    sent = request_bytes(RESPONSES, body)

    def late_s() -> float:
        links = [running.connect(20.0) for _ in range(16)]
        try:
            with watched(running) as late:
                for link in links:
                    link.sendall(sent)
                for link in links:
                    got = received(link)
                    assert got.startswith((b"HTTP/1.1 200", b"HTTP/1.1 503")), got[:200]
            return max(late)
        finally:
            for link in links:
                link.close()

    bound = 0.08 * slowness()
    assert best(late_s, bound) < bound
    running.idle()


@pytest.mark.parametrize(("what", "large"), [(flat(16, 1900), True), (flat(1, 1), False)], ids=["large", "small"])
def test_136_events_that_repeat_much_have_turns(
    running: Running, monkeypatch: pytest.MonkeyPatch, what: list[dict[str, Any]], *, large: bool
) -> None:
    """Three events repeat all of the request. Those of a small one wait for no turn."""
    turns: list[str] = []
    real = ResponseEvents._turn

    async def counted(self: ResponseEvents) -> None:
        if self._turns is not None:
            turns.append("")
        await real(self)

    monkeypatch.setattr(ResponseEvents, "_turn", counted)
    assert running.post(RESPONSES, {**TALK, "stream": True, "tools": what, "tool_choice": "none"}).status_code == 200
    assert len(turns) >= 3 if large else not turns


def test_136_a_value_is_looked_at_until_it_is_too_large() -> None:
    assert not exceeds({"a": ["bc", 1, None]}, 3, 6)
    assert exceeds({"a": ["bc", 1, None]}, 2, 6)
    assert exceeds({"a": ["bc", 1, None]}, 3, 5)
    assert not exceeds("abc", 3, 1)
    assert exceeds([[0] * 10**6] * 10**6, 10, 10**6)


@pytest.mark.parametrize(
    "asked",
    [
        StructuredOutputs(json={"enum": [0] * (1 << 20)}),
        StructuredOutputs(json={"description": "x" * (32 << 20)}),
        StructuredOutputs(choice=["x" * (32 << 20)]),
        StructuredOutputs(structural_tag={"type": "structural_tag", "format": {"value": "x" * (32 << 20)}}),
    ],
    ids=["values", "letters", "choice", "tag"],
)
def test_136_a_grammar_that_is_too_large_is_not_written(
    asked: StructuredOutputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """json.dumps would keep the interpreter meanwhile."""
    monkeypatch.setattr(compile, "json", None)

    def refused() -> None:
        with pytest.raises(ParamsError, match=f"more than {MAX_TEXT} characters"):
            grammar_of(asked)

    bound = 0.02 * slowness()
    assert best(lambda: longest_wait(refused), bound) < bound


def test_136_the_largest_grammar_is_written() -> None:
    text = json.dumps({"enum": ["x" * 1000] * 100})
    assert json.loads(grammar_of(StructuredOutputs(json=json.loads(text))).text) == json.loads(text)


def test_136_a_history_that_is_too_large_is_refused_for_good(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Busy was the answer, however often it was tried again."""
    asked = {"max_output_tokens": 1, "input": "a"}
    first = running.post(RESPONSES, asked).json()["id"]
    history_of = ResponseStore.history_of
    most = running.admission.most_held("a client")
    monkeypatch.setattr(ResponseStore, "history_of", lambda *given: (history_of(*given)[0], most))
    answer = running.post(RESPONSES, {**asked, "previous_response_id": first})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == "previous_response_id", answer.text
    running.idle()
    assert running.admission.held_bytes == 0


def test_136_a_long_history_is_checked_where_it_holds_nobody_up(running: Running) -> None:
    """A request of some bytes that goes on with one of 24,000 parts held the loop for 300 ms."""
    parts = [{"role": "user", "content": [{"type": "input_text", "text": "a"}] * 2000}] * 12
    asked = {"max_output_tokens": 1, "truncate_prompt_tokens": 8}
    first = running.post(RESPONSES, {**asked, "input": parts})
    assert first.status_code == 200, first.text
    sent = request_bytes(RESPONSES, {**asked, "input": "b", "previous_response_id": first.json()["id"], "store": False})

    keeps_nobody_waiting(running, sent, 200)
    running.idle()
    assert running.admission.held_bytes == 0
