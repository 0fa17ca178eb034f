"""Servers to fetch from, and the leave to fetch from this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.inputs.servers import Answer, Server


@pytest.fixture
def serve() -> Iterator[Callable[[Answer], Server]]:
    """Makes servers that end with the test."""
    servers: list[Server] = []

    def make(answer: Answer) -> Server:
        servers.append(Server(answer))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


@pytest.fixture
def private(monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses of this machine may be asked."""
    monkeypatch.setenv("BEHELD_ALLOW_PRIVATE_FETCH", "1")
