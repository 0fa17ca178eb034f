"""`grounding` over HTTP and offline: the places of an answer in pixels, its text as it is, and refusals by name."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from beheld import LLM, SamplingParams
from beheld.core.structured_outputs import StructuredOutputs
from tests import tiny
from tests.server.running import ENGINE, Running, data_url, source_of, talk

SCHEMA = {
    "type": "object",
    "properties": {
        "label": {"const": "cat"},
        "bbox_2d": {
            "type": "array",
            "prefixItems": [{"const": number} for number in (0, 500, 1000, 750)],
            "items": False,
            "minItems": 4,
        },
    },
    "required": ["label", "bbox_2d"],
}
ASK: dict[str, Any] = {
    "messages": talk("Where?", data_url(56, 84, seed=1)),
    "temperature": 0,
    "max_tokens": 200,
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
    "grounding": True,
}
FOUND = {"label": "cat", "image": "image 1", "box": [0.0, 42.0, 56.0, 63.0], "step": [0.056, 0.084]}


def test_the_answer_is_json_of_the_schema_and_its_places_are_pixels(running: Running) -> None:
    choice = running.post("/v1/chat/completions", ASK).json()["choices"][0]
    assert choice["grounding"] == [FOUND]
    assert json.loads(choice["message"]["content"]) == {"label": "cat", "bbox_2d": [0, 500, 1000, 750]}
    plain = running.post("/v1/chat/completions", {**ASK, "grounding": False}).json()["choices"][0]
    assert "grounding" not in plain
    assert plain["message"] == choice["message"]


def test_in_a_stream_they_come_with_the_end_of_each_answer(running: Running) -> None:
    chunks = events_of(running.post("/v1/chat/completions", {**ASK, "stream": True, "n": 2}).text)
    ends = [choice for chunk in chunks for choice in chunk["choices"] if choice.get("finish_reason")]
    assert [choice["grounding"] for choice in ends] == [[FOUND], [FOUND]]
    others = [choice for chunk in chunks for choice in chunk["choices"] if not choice.get("finish_reason")]
    assert not any("grounding" in choice for choice in others)


def test_responses_have_the_places_of_their_image(running: Running) -> None:
    image, text = ({"type": "input_image", "image_url": data_url(56, 84, seed=1)}, {"type": "input_text", "text": "?"})
    given = {"type": "json_schema", "name": "a", "schema": SCHEMA}
    body = {"input": [{"role": "user", "content": [image, text]}], "text": {"format": given}, "grounding": True}
    body |= {"temperature": 0, "max_output_tokens": 200}
    found = running.post("/v1/responses", body).json()
    assert found["grounding"] == [FOUND]
    assert json.loads(found["output"][0]["content"][0]["text"]) == {"label": "cat", "bbox_2d": [0, 500, 1000, 750]}
    assert running.get(f"/v1/responses/{found['id']}").json()["grounding"] == [FOUND]
    *others, last = events_of(running.post("/v1/responses", {**body, "stream": True}).text)
    assert (last["type"], last["response"]["grounding"]) == ("response.completed", [FOUND])
    assert not any("grounding" in event.get("response", {}) for event in others)
    plain = running.post("/v1/responses", {**body, "grounding": False}).json()
    assert "grounding" not in plain
    # The earlier image counts, too: the answer would not say which of the two it means.
    refused = running.post("/v1/responses", {**body, "previous_response_id": found["id"]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "grounding")


def test_messages_have_the_places_of_their_image(running: Running) -> None:
    image = {"type": "image", "source": source_of(data_url(56, 84, seed=1))}
    content = [image, {"type": "text", "text": "?"}]
    form = {"type": "json_schema", "schema": SCHEMA}
    body = {"messages": [{"role": "user", "content": content}], "output_config": {"format": form}, "grounding": True}
    body |= {"temperature": 0, "max_tokens": 200}
    found = running.post("/v1/messages", body).json()
    assert found["grounding"] == [FOUND]
    assert json.loads(found["content"][0]["text"]) == {"label": "cat", "bbox_2d": [0, 500, 1000, 750]}
    *others, end, _ = events_of(running.post("/v1/messages", {**body, "stream": True}).text)
    assert (end["type"], end["grounding"]) == ("message_delta", [FOUND])
    assert not any("grounding" in event for event in others)
    assert "grounding" not in running.post("/v1/messages", {**body, "grounding": None}).json()
    refused = running.post("/v1/messages", {**body, "messages": [{"role": "user", "content": "Where?"}]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "grounding")


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream."""
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def test_refusals_name_the_field(running: Running, locked: Running) -> None:
    two = talk("Where?", data_url(seed=1), data_url(seed=2))
    for body, words in (({**ASK, "messages": two}, "2 media items"), ({**ASK, "messages": talk("Where?")}, "no image")):
        refused = running.post("/v1/chat/completions", body)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "grounding"
        assert words in refused.json()["error"]["message"]
    refused = running.post("/v1/completions", {"prompt": "Where?", "grounding": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "grounding")
    headers = {"Authorization": "Bearer key-one"}
    refused = locked.post("/v1/chat/completions", {"messages": talk("Where?"), "grounding": True}, headers=headers)
    assert "has no known notation" in refused.json()["error"]["message"]


def test_offline_and_async_give_the_same() -> None:
    params = SamplingParams(temperature=0, max_tokens=200, structured_outputs=StructuredOutputs(json=SCHEMA))
    picture = tiny.picture(56, 84, 1)
    messages = [{"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": "?"}]}]
    prompt = {"prompt": tiny.prompt("qwen2_vl", 1, 0, "?"), "multi_modal_data": {"image": picture}}
    with LLM(str(tiny.checkpoint("qwen2_vl")), **ENGINE) as llm:
        outputs = [
            llm.chat(messages, params, use_tqdm=False, grounding=True)[0],
            llm.generate(prompt, params, use_tqdm=False, grounding=True)[0],
            list(llm.chat_stream(messages, params, grounding=True))[-1],
        ]
        plain = llm.chat(messages, params, use_tqdm=False)[0]
    for output in outputs:
        (found,) = output.outputs[0].grounding or ()
        assert (found.label, found.box) == ("cat", (0.0, 42.0, 56.0, 63.0))
    assert plain.outputs[0].grounding is None
    assert plain.outputs[0].text == outputs[0].outputs[0].text


def test_async_in_pieces(running: Running) -> None:
    async def last(pieces: str) -> Any:
        params = SamplingParams(temperature=0, max_tokens=99, structured_outputs=StructuredOutputs(json=SCHEMA))
        output = None
        async for output in running.llm.chat(
            ASK["messages"], params, f"grounded-{pieces}", pieces=pieces, grounding=True
        ):
            assert output.finished or output.outputs[0].grounding is None
        assert output is not None
        return output.outputs[0].grounding

    async def both() -> list[Any]:
        return [await last("delta"), await last("cumulative")]

    loop = running_loop(running)
    found = asyncio.run_coroutine_threadsafe(both(), loop).result(60)
    assert [[each.to_json() for each in one] for one in found] == [[FOUND], [FOUND]]


def running_loop(running: Running) -> Any:
    """The loop in which the server's engine is asked."""
    loop = running.llm._loop
    if loop is None:
        running.get("/health")
        loop = running.llm._loop
    if loop is None:
        pytest.fail("the server has no loop")
    return loop
