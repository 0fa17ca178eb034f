"""One server for all tests of this folder, as in life."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.server.running import ENGINE, Running

_open: list[Running] = []


@contextmanager
def kept(server: Running) -> Iterator[Running]:
    """Until the end of the block the server is one of those that every file leaves idle."""
    _open.append(server)
    try:
        yield server
    finally:
        _open.remove(server)
        server.close()


@pytest.fixture(scope="module", autouse=True)
def left_idle() -> Iterator[None]:
    """What a file began has ended when it ends: tests of other folders may compute in this process."""
    yield
    for server in _open:
        server.idle()


@pytest.fixture(scope="session")
def running() -> Iterator[Running]:
    """A server without a key."""
    with kept(Running()) as found:
        yield found


@pytest.fixture(scope="session")
def locked() -> Iterator[Running]:
    """A server with two keys."""
    with kept(Running("llama", api_keys=("key-one", "key-two"))) as found:
        yield found


@pytest.fixture(scope="session")
def hearing() -> Iterator[Running]:
    """A server whose model hears, at most two sounds a request."""
    with kept(Running("qwen2_audio", ENGINE | {"limit_mm_per_prompt": {"audio": 2}})) as found:
        yield found
