"""Turns at the event loop (case 127): many requests at once are begun one by one, clients by turns."""

from __future__ import annotations

import asyncio
import socket
import struct
from itertools import pairwise

import pytest

from beheld.server import app, limits
from beheld.server.listen import listen
from beheld.server.options import ServerOptions
from beheld.server.request_turns import RequestTurns
from tests.server.running import Running, request_bytes
from tests.server.slowness import best, slowness
from tests.server.test_http_protocol import late_s

pytestmark = pytest.mark.case(127)


def test_one_begins_in_each_turn_of_the_loop_and_clients_take_turns() -> None:
    async def story() -> tuple[list[str], list[int]]:
        turns, order, when, now = RequestTurns(), list[str](), list[int](), 0

        async def one(client: str) -> None:
            await turns.take(client)
            order.append(client)
            when.append(now)

        tasks = [asyncio.ensure_future(one(client)) for client in "aaaaabbc"]
        await asyncio.sleep(0)
        tasks[3].cancel()
        while not all(task.done() for task in tasks):
            now += 1
            await asyncio.sleep(0)
        # Who comes alone does not wait.
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        alone = asyncio.ensure_future(one("d"))
        await asyncio.sleep(0)
        assert alone.done()
        return order, when

    order, when = asyncio.run(story())
    assert "".join(order) == "aabcabad"
    assert all(later > earlier for earlier, later in pairwise(when[:-1]))


def test_many_bodies_that_are_parsed_in_the_loop_hold_nobody_up(running: Running) -> None:
    """48 bodies of 32 KiB, each of which takes some milliseconds, held the loop for a third of a second."""
    body = {"messages": [], **{f"max_tokenz{number:03}x": 1 for number in range(1500)}}
    sent = request_bytes("/v1/chat/completions", body)
    assert len(sent) < limits.INLINE_BYTES
    bound = 0.1 * slowness()
    assert best(lambda: late_s(running, sent, b"400", 48), bound) < bound
    running.idle()


def test_the_document_is_written_once(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 clients that asked for it at once held /health for two seconds."""
    first = running.get("/openapi.json")
    assert first.json()["openapi"].startswith("3.")
    monkeypatch.setattr(app, "document", None)
    assert running.get("/openapi.json").content == first.content
    assert first.headers["content-type"] == "application/json"


def test_more_connections_wait_than_are_accepted_in_one_turn(running: Running) -> None:
    """Else the system drops what a flood leaves no room for, and others try again after a second."""

    def queue(listener: socket.socket) -> int:
        # Of struct tcp_info of a socket that listens: tcpi_sacked.
        return int(struct.unpack_from("=I", listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104), 28)[0])

    with open("/proc/sys/net/core/somaxconn", encoding="ascii") as file:
        allowed = int(file.read())
    assert queue(running.listener) == min(4096, allowed)
    assert running.server.config.backlog < 100
    with listen(ServerOptions(port=0)) as other:
        assert queue(other) == min(4096, allowed)


@pytest.mark.case(128)
def test_a_template_has_so_many_variables_and_no_more(running: Running) -> None:
    """40,000 of them held /health for a second."""
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    most = {f"a{number}": 1 for number in range(limits.MAX_VARIABLES)}
    assert running.post("/v1/chat/completions", {**body, "chat_template_kwargs": most}).status_code == 200
    refused = running.post("/v1/chat/completions", {**body, "chat_template_kwargs": {**most, "b": 1}})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "chat_template_kwargs"
