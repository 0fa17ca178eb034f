"""What bodies take in memory (case 143): as they are parsed, and while their answers are computed."""

from __future__ import annotations

import gc
import json
import time
from typing import Any

import pytest

from beheld.server import limits
from beheld.server.admission import AdmissionControl
from beheld.server.app import Service
from beheld.server.options import ServerOptions
from beheld.utils.bounded_json import JsonBounds, JsonCounts, parse_counted
from beheld.utils.piecewise_json import parse_counted as parse_counted_in_pieces
from tests.server.running import Running, request_bytes

pytestmark = pytest.mark.case(143)

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"


def test_parts_are_counted_however_a_body_is_read() -> None:
    value = {"a": [1, 2, {"b": "c"}], "d": {}, "e": [[]]}
    text = json.dumps(value)
    counts = JsonCounts(keys=4, containers=6, values=4)
    assert parse_counted(text, JsonBounds()) == (value, counts)
    assert parse_counted_in_pieces(text.encode(), JsonBounds()) == (value, counts)


def test_signs_in_texts_may_count_but_never_beyond_the_bounds() -> None:
    bounds = JsonBounds(keys=10, containers=10, values=10)
    _, counts = parse_counted(json.dumps(["a, b: [c]"]), bounds)
    assert counts == JsonCounts(keys=1, containers=2, values=1)
    # As many as a text may have that is JSON itself, such as a tool's result: it is one text.
    _, counts = parse_counted(json.dumps([json.dumps([{}] * 2000)]), JsonBounds())
    assert counts == JsonCounts(keys=0, containers=1, values=0)
    # Too many to be believed, so they are told apart.
    _, counts = parse_counted(json.dumps([",:[" * 20]), bounds)
    assert counts == JsonCounts(keys=0, containers=1, values=0)


def test_a_body_that_may_be_sent_is_read_however_many_parts_it_has() -> None:
    admission = AdmissionControl(ServerOptions(names=("a",), max_body_bytes=1 << 20, max_reading_bytes=1 << 20))
    held = admission.hold("a client")
    held.grow(1 << 19)
    held.grow_within(1 << 30)
    assert held.size == admission.most_held("a client")
    # Which thread goes on with it depends on what came.
    assert held.size - held.parsed == 1 << 19
    held.release()
    assert admission.held_bytes == 0


def test_what_parsing_makes_of_a_body_counts_until_it_is_prepared(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """24,000 parts of 27 bytes take 18 MB, and counted as 650 KB: hundreds of such bodies waited at once."""
    counted: list[int] = []
    real = Service._ordered

    async def planned(self: Any, request: Any, body: Any) -> Any:
        counted.append(running.admission.held_bytes)
        return await real(self, request, body)

    monkeypatch.setattr(Service, "_ordered", planned)
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}] * 500}] * 12
    running.post(CHAT, {"messages": parts, "max_tokens": 1})
    assert counted[0] > 6000 * limits.CONTAINER_BYTES - limits.FREE_BYTES
    running.idle()
    assert running.admission.held_bytes == 0


MARK = "a_name_that_nothing_else_has"
_LONG: dict[str, Any] = {"max_tokens": 300, "ignore_eos": True, "stream": True}
_TALK: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}
KEPT: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {**_TALK, **_LONG, "chat_template_kwargs": {MARK: [1]}}),
    "arguments": (CHAT, {**_TALK, **_LONG, "vllm_xargs": {MARK: [1]}}),
    "completion": (COMPLETIONS, {"prompt": "a", **_LONG, "vllm_xargs": {MARK: [1]}}),
    "message": ("/v1/messages", {**_TALK, "max_tokens": 300, "stream": True, "chat_template_kwargs": {MARK: [1]}}),
    "response": (
        RESPONSES,
        {
            "input": "a",
            "max_output_tokens": 300,
            "ignore_eos": True,
            "stream": True,
            "chat_template_kwargs": {MARK: [1]},
        },
    ),
}


@pytest.mark.parametrize("what", KEPT)
def test_an_answer_keeps_nothing_of_what_its_prompt_was_made_of(running: Running, what: str) -> None:
    """Variables of templates, of 60 MB if a client likes, stayed until the answer's end, and counted as nothing."""
    path, body = KEPT[what]

    def kept() -> int:
        return sum(type(one) is dict and MARK in one for one in gc.get_objects())

    before = kept()
    # The collector, which finds them, does not track a mapping of numbers.
    sent = json.loads(json.dumps({MARK: [1]}))
    assert kept() == before + 1
    del sent
    with running.connect(20.0) as link:
        link.sendall(request_bytes(path, body))
        assert link.recv(12) == b"HTTP/1.1 200"
        deadline = time.monotonic() + 5
        while kept() > before:
            assert running.admission.busy, "the answer has ended"
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert running.admission.busy, "the answer has ended"
    running.idle()
