"""A stream that was cut is taken up again by its id, for a while and under a bound of bytes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import httpx
import pytest

from beheld.server.admission import AdmissionControl
from beheld.server.errors import HttpError
from beheld.server.field_names import NO_NAMES
from beheld.server.options import ServerOptions
from beheld.server.resume import Recording, RecordingStore, start_of
from tests.server.running import ENGINE, Running, talk

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
ASK = {"messages": talk("Hello"), "max_tokens": 60, "temperature": 0, "stream": True, "ignore_eos": True}
TWO = ("key-one", "key-two")


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    found = Running("qwen2", ENGINE, api_keys=TWO)
    yield found
    found.idle()
    found.close()


def headers(key: str = TWO[0], **more: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}", **more}


def events_of(text: str) -> list[tuple[str, str]]:
    """(id, data) of each event."""
    made = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines())
        if fields:
            made.append((fields["id"], fields["data"]))
    return made


def text_of(events: list[tuple[str, str]]) -> str:
    chunks = [json.loads(data) for _, data in events if data != "[DONE]"]
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


def cut(server: Running, count: int) -> list[tuple[str, str]]:
    """Begin a stream and leave after about `count` events."""
    got = ""
    asked = headers(**{"X-Resumable": "true"})
    with httpx.stream("POST", server.url + CHAT, json=ASK, headers=asked, timeout=60, trust_env=False) as answer:
        assert answer.status_code == 200
        for piece in answer.iter_text():
            got += piece
            if got.count("\n\n") >= count:
                break
    return events_of(got[: got.rindex("\n\n") + 2])


def take_up(server: Running, name: str, last: str | None, key: str = TWO[0]) -> httpx.Response:
    more = {} if last is None else {"Last-Event-ID": last}
    return server.get(f"/v1/streams/{name}", headers=headers(key, **more))


def test_a_cut_stream_goes_on_where_it_was_left(server: Running) -> None:
    whole = server.post(CHAT, {**ASK, "stream": False}, headers=headers()).json()["choices"][0]["message"]["content"]
    first = cut(server, 3)
    last = first[-1][0]
    name = last.rpartition(":")[0]
    rest = take_up(server, name, last)
    assert rest.headers["content-type"].startswith("text/event-stream")
    later = events_of(rest.text)
    assert [entry for entry, _ in first + later] == [f"{name}:{number}" for number in range(len(first + later))]
    assert later[-1][1] == "[DONE]"
    assert text_of(first + later) == whole
    assert events_of(take_up(server, name, None).text) == first + later
    assert take_up(server, name, last, TWO[1]).status_code == 404
    assert take_up(server, name, "other:1").status_code == 400
    assert take_up(server, name, f"{name}:99999").status_code == 410
    assert take_up(server, "stream-x", None).status_code == 404


def test_without_the_header_a_cut_ends_the_answer(server: Running) -> None:
    asked = {**ASK, "max_tokens": 1500}
    with httpx.stream("POST", server.url + CHAT, json=asked, headers=headers(), timeout=60, trust_env=False) as answer:
        assert "id: " not in next(answer.iter_text())
    deadline = time.monotonic() + 10
    while server.admission.busy and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not server.admission.busy


def test_other_apis_streams_are_taken_up_too(server: Running) -> None:
    asked = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "stream": True, "model": "tiny"}
    text = server.post(MESSAGES, asked, headers=headers(**{"X-Resumable": "True"})).text
    events = events_of(text)
    again = take_up(server, events[0][0].rpartition(":")[0], events[1][0]).text
    assert events_of(again) == events[2:]
    assert "event: message_stop" in again


def recorded(max_bytes: int, kept_s: float, count: int, endless: bool = False) -> tuple[RecordingStore, Recording, Any]:
    """A store with one answer of `count` chunks; outcomes are appended to the list."""
    outcomes: list[Exception | None] = []

    async def chunks() -> AsyncGenerator[dict[str, Any], None]:
        for number in range(count):
            yield {"number": number}
            await asyncio.sleep(0)
        if endless:
            await asyncio.Event().wait()

    store = RecordingStore(max_bytes, AdmissionControl(ServerOptions()), kept_s)
    return store, store.record(chunks(), outcomes.append, NO_NAMES, "me"), outcomes


def test_an_answer_that_nobody_takes_up_ends() -> None:
    async def run() -> None:
        store, recording, outcomes = recorded(1 << 20, 0.05, 3, endless=True)
        events = recording.events(0)
        await anext(events)
        await events.aclose()
        await asyncio.sleep(0.02)
        assert store.get(recording.name, "me") is recording
        assert not outcomes
        await asyncio.sleep(0.2)
        assert len(outcomes) == 1
        with pytest.raises(HttpError, match="no stream"):
            store.get(recording.name, "me")

    asyncio.run(run())


def test_bytes_are_bounded_and_a_reader_gets_every_event() -> None:
    async def run() -> None:
        full, recording, outcomes = recorded(400, 60.0, 50)
        most = 0
        seen = []
        async for event in recording.events(0):
            most = max(most, recording.num_bytes)
            seen.append(event)
            await asyncio.sleep(0)
        assert [event.split(b"\n")[0].rpartition(b":")[2] for event in seen] == [b"%d" % n for n in range(51)]
        assert most <= 400
        assert outcomes == [None]
        with pytest.raises(HttpError, match="not kept"):
            recording.check(0)
        left, unread, others = recorded(400, 60.0, 50)
        await asyncio.sleep(0.1)
        assert len(others) == 1
        assert others[0] is not None
        with pytest.raises(HttpError, match="no stream"):
            left.get(unread.name, "me")
        recording.drop()
        unread.drop()
        assert full.num_bytes == left.num_bytes == 0

    asyncio.run(run())


def test_the_id_of_an_event_is_checked() -> None:
    assert start_of(None, "a") == 0
    assert start_of("a:7", "a") == 8
    for wrong in ("", "7", "b:7", "a:-1", "a:x", "a:" + "9" * 12, "a:²"):
        with pytest.raises(HttpError, match="Last-Event-ID"):
            start_of(wrong, "a")
