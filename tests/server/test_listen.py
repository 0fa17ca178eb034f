"""Who may reach a server is told as it starts, where that may be strangers."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import time
from dataclasses import replace
from typing import NoReturn

import pytest

from beheld.server.acceptor import Acceptor, Uncounted
from beheld.server.listen import is_own, listen
from beheld.server.options import ServerOptions
from beheld.server.serve import LoopErrors
from tests.server.running import SMALL

pytestmark = pytest.mark.case(19)


@pytest.mark.parametrize(
    ("host", "keys", "warned"),
    [
        ("127.0.0.1", (), False),
        ("localhost", (), False),
        ("127.0.0.1", ("secret",), False),
        ("0.0.0.0", (), True),
        ("0.0.0.0", ("secret",), False),
        ("::", (), True),
        ("::1", (), False),
    ],
)
def test_an_open_door_is_warned_of(
    host: str, keys: tuple[str, ...], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    if ":" in host and not socket.has_ipv6:
        pytest.skip("no IPv6")
    logger = logging.getLogger("beheld")
    logger.addHandler(caplog.handler)
    try:
        listen(replace(SMALL, host=host, api_keys=keys)).close()
    finally:
        logger.removeHandler(caplog.handler)
    said = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert bool(said) is warned
    for record in said:
        assert "--api-key" in record.getMessage()
        assert host in record.getMessage()
        assert "secret" not in record.getMessage()


def test_addresses_of_this_machine_alone() -> None:
    for own in ("127.0.0.1", "127.8.0.1", "::1", "::ffff:127.0.0.1"):
        assert is_own(own), own
    for other in ("0.0.0.0", "::", "192.168.1.4", "fe80::1%eth0", "::ffff:10.0.0.1", "93.184.216.34"):
        assert not is_own(other), other


def test_75_without_descriptors_it_asks_once_a_second_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """asyncio wrote 20,000 lines a second, and took a core for it."""
    asked: list[float] = []

    def none_left(self: socket.socket) -> NoReturn:
        asked.append(time.monotonic())
        raise OSError(errno.EMFILE, "Too many open files")

    async def serve(listener: socket.socket) -> bytes:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(LoopErrors())
        answered = loop.create_future()

        async def answer(accepted: socket.socket) -> None:
            with accepted:
                answered.set_result(await loop.sock_recv(accepted, 9))

        server = Acceptor(listener, answer, Uncounted())
        with monkeypatch.context() as patch, socket.create_connection(listener.getsockname()) as link:
            patch.setattr(socket.socket, "accept", none_left)
            await asyncio.sleep(2.5)
            patch.undo()
            link.sendall(b"hello")
            found: bytes = await asyncio.wait_for(answered, 5)
        server.close()
        return found

    with listen(ServerOptions(port=0)) as listener, caplog.at_level(logging.ERROR):
        listener.setblocking(False)
        assert asyncio.run(serve(listener)) == b"hello"
    assert 2 <= len(asked) <= 4, len(asked)
    assert len([record for record in caplog.records if "Too many open files" in record.getMessage()]) == 1
