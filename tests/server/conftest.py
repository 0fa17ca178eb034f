"""One server for all tests of this folder, as in life."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.running import ENGINE, Running


@pytest.fixture(scope="session")
def running() -> Iterator[Running]:
    """A server without a key."""
    found = Running()
    yield found
    found.close()


@pytest.fixture(scope="session")
def locked() -> Iterator[Running]:
    """A server with two keys."""
    found = Running("llama", api_keys=("key-one", "key-two"))
    yield found
    found.close()


@pytest.fixture(scope="session")
def hearing() -> Iterator[Running]:
    """A server whose model hears, at most two sounds a request."""
    found = Running("qwen2_audio", ENGINE | {"limit_mm_per_prompt": {"audio": 2}})
    yield found
    found.close()
