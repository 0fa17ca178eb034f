"""Who may reach a server is told as it starts, where that may be strangers."""

from __future__ import annotations

import logging
import socket
from dataclasses import replace

import pytest

from beheld.server.listen import is_own, listen
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
