"""The bytes of streams of every kind, with an engine that follows a script.

`streamed_bytes.json` holds what each case's client receives. Write it anew with

    python -m tests.server.test_streamed_bytes

and read the difference: clients depend on each byte.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from beheld.core.errors import CulpritError
from beheld.core.outputs import TokenEvent
from beheld.core.plan import TokenLogprobs
from beheld.core.request import FinishReason, Request
from beheld.engine.messages import Abort, Events, Message, Reply, Stop, Submit
from tests.server.running import Running, received, request_bytes, talk

RECORD = Path(__file__).with_name("streamed_bytes.json")
WORDS = 'He said: "caf\u00e9\\bar"\n\tand \u2013 \U0001f600 </s> 3 \u20ac.\x01 \u2028'
CALL = 'Well. <tool_call>\n{"name": "look", "arguments": {"at": "a \\"cat\\""}}\n</tool_call> Done.'
TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}},
    }
]
USAGE = {"stream_options": {"include_usage": True}}
EACH_USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
# Name: path, words of the answer, and fields of the request.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "plain": (CHAT, WORDS, {}),
    "usage": (CHAT, WORDS, USAGE),
    "usage_each": (CHAT, WORDS, EACH_USAGE),
    "logprobs": (CHAT, WORDS, {"logprobs": True, "top_logprobs": 2}),
    "logprobs_as_ids": (CHAT, WORDS, {"logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True}),
    "token_ids": (CHAT, WORDS, {"return_token_ids": True}),
    "two_answers": (CHAT, WORDS, {"n": 2, **USAGE}),
    "stop_string": (CHAT, WORDS, {"stop": ["and \u2013", "never"]}),
    "stop_string_included": (CHAT, WORDS, {"stop": ["\tand"], "include_stop_str_in_output": True}),
    "warnings": (CHAT, WORDS, {"stream_options": {"include_obfuscation": True}}),
    "tools": (CHAT, CALL, {"tools": TOOLS, **USAGE}),
    "tools_unused": (CHAT, WORDS, {"tools": TOOLS}),
    "reasoning": (CHAT, f"<think>hm, {WORDS}</think>\n\n{WORDS}", USAGE),
    "reasoning_hidden": (CHAT, f"<think>hm</think>{WORDS}", {"include_reasoning": False}),
    "image": (CHAT, WORDS, {"messages": "image"}),
    "resumable": (CHAT, WORDS, {"header": "X-Resumable: true"}),
    "failed": (CHAT, WORDS, {"max_tokens": 13}),
    "culprit": (CHAT, WORDS, {"max_tokens": 14}),
    "restarted": (CHAT, WORDS, {"max_tokens": 15}),
    "several_tokens": (CHAT, WORDS, {"max_tokens": 16}),
    "completion": (TEXT, WORDS, {}),
    "completion_usage": (TEXT, WORDS, {"n": 2, **EACH_USAGE}),
    "completion_logprobs": (TEXT, WORDS, {"logprobs": 2, "echo": True}),
    "messages": ("/v1/messages", f"<think>hm</think>{WORDS}", {}),
    "responses": ("/v1/responses", f"<think>hm</think>{WORDS}", {}),
}


class Scripted:
    """An engine that gives each request the tokens of `words`; it waits until the server has sent each step.

    Without these waits, a server that is behind would send several tokens in one chunk.
    """

    alive = True

    def __init__(self, running: Running) -> None:
        self.words = ""
        self._running = running
        self._receive: Callable[[Reply], None] = running.llm._receive
        self._stopped: set[str] = set()

    def send(self, message: Message) -> None:
        """Play a request's script in a thread."""
        if isinstance(message, Submit):
            threading.Thread(target=self._play, args=(message.requests,), daemon=True).start()
        elif isinstance(message, Stop):
            self._stopped.add(message.request_id)
        elif isinstance(message, Abort):
            self._stopped |= set(message.request_ids)

    def close(self) -> None:
        """See Engine."""

    def _play(self, requests: tuple[Request, ...]) -> None:
        ids = self._running.llm.tokenizer(self.words, add_special_tokens=False)["input_ids"]
        params: Any = requests[0].params
        step = 3 if params.max_tokens == 16 else 1
        for place in range(0, len(ids), step):
            some = ids[place : place + step]
            ended = FinishReason.STOP if place + step >= len(ids) else None
            if params.max_tokens in (13, 14) and place == 4:
                kind = CulpritError if params.max_tokens == 14 else ValueError
                error: Any = CulpritError("It broke.", "Do not.") if kind is CulpritError else None
                error = error or _step_error()
                self._tell([TokenEvent(each.id, (), FinishReason.ERROR, error=error) for each in requests])
                return
            if params.max_tokens == 15 and place == 1:
                self._tell([TokenEvent(each.id, (), restarted=True) for each in requests])
                self._tell([TokenEvent(each.id, tuple(ids[:1])) for each in requests])
            self._tell(
                [
                    TokenEvent(each.id, tuple(some), ended, logprobs=tuple(map(_logprobs, some)))
                    for each in requests
                    if each.id not in self._stopped
                ]
            )

    def _tell(self, events: list[TokenEvent]) -> None:
        self._receive(Events(tuple(events)))
        loop = self._running.server._loop
        assert loop is not None
        asyncio.run_coroutine_threadsafe(_turns(), loop).result(30)


async def _turns() -> None:
    for _ in range(40):
        await asyncio.sleep(0)


def _step_error() -> Exception:
    from beheld.core.errors import StepError

    return StepError("A step failed.", "Try again.")


def _logprobs(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(token_id, -0.125 * (token_id % 9), 1 + token_id % 2, (token_id, 5), (-0.5, -1.25))


class Player:
    """Two servers, one of which parses reasoning and calls, with scripted engines."""

    def __init__(self) -> None:
        self._servers = {
            False: Running(),
            True: Running(tool_parser="hermes", reasoning_parser="think", trust_processor_options=True),
        }
        self._real = {parses: each.llm._engine for parses, each in self._servers.items()}
        self._engines = {parses: Scripted(each) for parses, each in self._servers.items()}
        for parses, each in self._servers.items():
            each.llm._engine = self._engines[parses]  # type: ignore[assignment]

    def close(self) -> None:
        """Close both."""
        for parses, each in self._servers.items():
            each.llm._engine = self._real[parses]
            each.close()

    def stream(self, name: str, version: str = "1.1") -> str:
        """What a client of a case receives, without what differs by request: ids and times."""
        path, words, fields = CASES[name]
        parses = "tools" in fields or "<think>" in words
        self._engines[parses].words = words
        header, image = fields.get("header"), fields.get("messages") == "image"
        fields = {key: value for key, value in fields.items() if key not in ("header", "messages")}
        from tests.server.running import data_url

        asked: dict[str, Any] = {"messages": talk("What?", *([data_url()] if image else []))}
        asked = {"prompt": "What?"} if path == TEXT else {"input": "What?"} if "responses" in path else asked
        limit = {"max_output_tokens": 99} if "responses" in path else {"max_tokens": 99}
        body = {"model": "tiny", **asked, **limit, "stream": True, "temperature": 0, **fields}
        with self._servers[parses].connect(60) as link:
            data = request_bytes(path, body, *([header] if header else []))
            link.sendall(data.replace(b"HTTP/1.1", b"HTTP/" + version.encode(), 1))
            got = received(link)
        head, _, rest = got.partition(b"\r\n\r\n")
        assert head.split(b" ")[1] == b"200", got
        if version == "1.1":
            rest = _content(rest)
        return _masked(rest.decode())


def _content(chunked: bytes) -> bytes:
    """The content of a body in chunks, with the bounds of HTTP's chunks shown."""
    found = b""
    while True:
        size, _, chunked = chunked.partition(b"\r\n")
        count = int(size, 16)
        if not count:
            assert chunked == b"\r\n"
            return found
        assert chunked[count : count + 2] == b"\r\n"
        found, chunked = found + chunked[:count] + b"|\n", chunked[count + 2 :]


def _masked(text: str) -> str:
    text = re.sub(r"[0-9a-f]{24,32}", "ID", text)
    text = re.sub(r'"(created|created_at|completed_at)":[0-9.]+', r'"\1":0', text)
    return re.sub(r'"milliseconds":\{[^}]*\}', '"milliseconds":{}', text)


@pytest.fixture(scope="module")
def player() -> Iterator[Player]:
    made = Player()
    yield made
    made.close()


@pytest.mark.parametrize("name", CASES)
def test_clients_receive_the_recorded_bytes(player: Player, name: str) -> None:
    assert player.stream(name) == json.loads(RECORD.read_text())[name]


def test_an_older_client_receives_the_same_without_bounds(player: Player) -> None:
    recorded = json.loads(RECORD.read_text())["plain"]
    assert player.stream("plain", "1.0") == recorded.replace("|\n", "")


if __name__ == "__main__":
    one = Player()
    found = {name: one.stream(name) for name in CASES}
    RECORD.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    one.close()
    sys.exit()
