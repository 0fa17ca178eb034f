"""One server for all tests of this folder, as in life."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.running import Running


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
