"""Requests of agents and of Open WebUI are answered in the form that their client libraries declare, turn by turn."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import anthropic.types
import openai.types.chat
import openai.types.responses
import pytest
from pydantic import BaseModel

from tests.compat import scripted
from tests.server.agent_requests import (
    ANSWER,
    CLAUDE_CODE,
    CLAUDE_HEADERS,
    CODEX,
    OPEN_WEBUI,
    OPEN_WEBUI_HEADERS,
    OPEN_WEBUI_TITLE,
    PATCH,
)
from tests.server.running import Running

COMMAND = {"command": ["ls", "-a"]}
REASONING, WORDS = ANSWER[1], ANSWER[3]


def by_type(union: Any) -> dict[str, type[BaseModel]]:
    """The classes of a union of events, by the type that each has."""
    classes = get_args(get_args(union)[0])
    return {name: kind for kind in classes for name in get_args(kind.model_fields["type"].annotation)}


RESPONSE_EVENTS = by_type(openai.types.responses.ResponseStreamEvent)
MESSAGE_EVENTS = by_type(anthropic.types.RawMessageStreamEvent)


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server whose model always answers ANSWER."""
    folder = Path(tmp_path_factory.mktemp("agent"))
    scripted.write(folder, ANSWER)
    running = Running(folder, tool_parser="hermes", reasoning_parser="think")
    yield running
    running.close()


def events_of(running: Running, path: str, body: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    answer = running.post(path, body, **options)
    assert answer.status_code == 200, answer.text
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]


def test_codex(agent: Running) -> None:
    events = events_of(agent, "/v1/responses", CODEX)
    for event in events:
        RESPONSE_EVENTS[event["type"]].model_validate(event)
    assert events[-1]["type"] == "response.completed"
    response = events[-1]["response"]
    reasoning, message, call, patch = response["output"]
    assert reasoning["content"][0]["text"] == REASONING
    assert message["content"][0]["text"].strip() == WORDS
    assert (call["type"], call["name"], json.loads(call["arguments"])) == ("function_call", "shell", COMMAND)
    assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "apply_patch", PATCH)
    pieces = [event for event in events if event["type"].startswith("response.custom_tool_call_input")]
    assert [(piece["type"].split(".")[-1], piece["item_id"]) for piece in pieces] == [
        ("delta", patch["id"]),
        ("done", patch["id"]),
    ]
    assert [warning["param"] for warning in response["warnings"]].count("tools") == 1
    told = [
        {"type": "reasoning", "summary": [], "content": reasoning["content"], "encrypted_content": None},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": WORDS}]},
        {**call, "status": "completed"},
        {"type": "function_call_output", "call_id": call["call_id"], "output": "note.txt"},
        patch,
        {"type": "custom_tool_call_output", "call_id": patch["call_id"], "output": "Done."},
    ]
    again = events_of(agent, "/v1/responses", CODEX | {"input": [*CODEX["input"], *told]})
    assert again[-1]["type"] == "response.completed"
    # The model was shown the call of the patch as its function's arguments.
    used = again[-1]["response"]["usage"]["input_tokens"] - response["usage"]["input_tokens"]
    assert used > 20


def test_a_custom_tool_may_be_the_choice(agent: Running) -> None:
    body = CODEX | {"tool_choice": {"type": "custom", "name": "apply_patch"}, "stream": False, "max_output_tokens": 40}
    found = agent.post("/v1/responses", body).json()
    assert {item["type"] for item in found["output"]} <= {"reasoning", "custom_tool_call"}
    assert all(isinstance(item["input"], str) for item in found["output"] if item["type"] == "custom_tool_call")


def test_claude_code(agent: Running) -> None:
    counted = {name: CLAUDE_CODE[name] for name in ("model", "messages", "tools", "system", "thinking")}
    path = "/v1/messages/count_tokens?beta=true"
    assert agent.post(path, counted, headers=CLAUDE_HEADERS).json()["input_tokens"] > 20
    events = events_of(agent, "/v1/messages?beta=true", CLAUDE_CODE, headers=CLAUDE_HEADERS)
    for event in events:
        if event["type"] != "ping":
            MESSAGE_EVENTS[event["type"]].model_validate(event)
    assert [events[0]["type"], *(event["type"] for event in events[-2:])] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    blocks = blocks_of(events)
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use", "tool_use"]
    assert (blocks[0]["thinking"], blocks[1]["text"].strip()) == (REASONING, WORDS)
    assert [(block["name"], block["input"]) for block in blocks[2:]] == [
        ("shell", COMMAND),
        ("apply_patch", {"input": PATCH}),
    ]
    results = [
        {
            "type": "tool_result",
            "tool_use_id": block["id"],
            "content": [{"type": "text", "text": "Done."}],
            "is_error": False,
        }
        for block in blocks[2:]
    ]
    turns = [{"role": "assistant", "content": blocks}, {"role": "user", "content": results}]
    again = CLAUDE_CODE | {"messages": [*CLAUDE_CODE["messages"], *turns]}
    assert events_of(agent, "/v1/messages?beta=true", again, headers=CLAUDE_HEADERS)[-1]["type"] == "message_stop"


def blocks_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks of a stream of messages' events."""
    blocks: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"] | {"json": ""})
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            for name, kind in (("text", "text"), ("thinking", "thinking"), ("partial_json", "json"), ("signature", "")):
                if name in delta:
                    blocks[-1][kind or name] = blocks[-1].get(kind or name, "") + delta[name]
    for block in blocks:
        given = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(given)
    return blocks


def test_open_webui(agent: Running) -> None:
    models = agent.get("/v1/models", headers=OPEN_WEBUI_HEADERS).json()
    assert [model["id"] for model in models["data"]] == ["tiny"]
    chunks = events_of(agent, "/v1/chat/completions", OPEN_WEBUI, headers=OPEN_WEBUI_HEADERS)
    for chunk in chunks:
        openai.types.chat.ChatCompletionChunk.model_validate(chunk)
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas).strip() == WORDS
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == REASONING
    assert chunks[-1]["usage"]["completion_tokens"] == len(ANSWER) + 1
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        for piece in delta.get("tool_calls") or ():
            call = calls.setdefault(
                piece["index"], {"index": piece["index"], "function": {"name": "", "arguments": ""}}
            )
            call |= {name: piece[name] for name in ("id", "type") if piece.get(name)}
            for name in ("name", "arguments"):
                call["function"][name] += piece["function"].get(name) or ""
    assert [call["function"]["name"] for call in calls.values()] == ["shell", "apply_patch"]
    told = [
        {"role": "assistant", "content": WORDS, "tool_calls": list(calls.values())},
        *({"role": "tool", "tool_call_id": call["id"], "content": "Done."} for call in calls.values()),
    ]
    again = OPEN_WEBUI | {"messages": [*OPEN_WEBUI["messages"], *told]}
    assert events_of(agent, "/v1/chat/completions", again, headers=OPEN_WEBUI_HEADERS)
    title = agent.post("/v1/chat/completions", OPEN_WEBUI_TITLE, headers=OPEN_WEBUI_HEADERS).json()
    assert openai.types.chat.ChatCompletion.model_validate(title).choices[0].finish_reason == "stop"


@pytest.mark.parametrize("n", [1, 2])
def test_usage_counts_the_tokens_of_the_reasoning(agent: Running, n: int) -> None:
    asked = {"messages": [{"role": "user", "content": "Hello."}], "n": n, "temperature": 0, "include_reasoning": False}
    whole = agent.post("/v1/chat/completions", asked).json()["usage"]
    assert whole["completion_tokens_details"] == {"reasoning_tokens": n}
    assert whole["completion_tokens"] > n
    streamed = {**asked, "stream": True, "stream_options": {"include_usage": True}}
    assert events_of(agent, "/v1/chat/completions", streamed)[-1]["usage"] == whole
