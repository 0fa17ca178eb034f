"""Who asks: an opaque name for each client, so that clients share the engine fairly, and what their requests broke."""

from __future__ import annotations

import hashlib
import ipaddress
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable

from starlette.types import Scope

from beheld.server.errors import HttpError
from beheld.server.options import ServerOptions
from beheld.utils.log import get_logger, once

logger = get_logger(__name__)

# A client that made this many steps fail within this time is refused: each failure costs other sequences a retry.
MAX_CULPRITS = 8
WINDOW_S = 60.0
_FORWARDED = b"x-forwarded-for"
# Clients whose failures are remembered.
_MOST = 4096


class Clients:
    """Names clients: by their keys if there are several keys, else by their addresses.

    A name is a keyed hash with a secret of this server: it tells neither a key nor an address.

    Args:
        options: the server's.
        clock: seconds.
        secret: of all fronts of the server; empty for one of this process.
    """

    def __init__(
        self, options: ServerOptions, clock: Callable[[], float] = time.monotonic, secret: bytes = b""
    ) -> None:
        self._clock = clock
        # Client -> times of its last failed steps; the client that failed last is the last.
        self._culprits: dict[str, deque[float]] = {}
        self._fair = options.fair_shares
        self._proxied = bool(options.forwarded_allow_ips)
        self._by_key = len(options.api_keys) > 1
        self._secret = secret or secrets.token_bytes(16)

    def of(self, scope: Scope) -> str:
        """The client of a request; empty if all are to be one client."""
        if not self._fair:
            return ""
        name = scope["state"].get("client") if self._by_key else None
        if not (name or self._proxied) and any(header == _FORWARDED for header, _ in scope.get("headers", ())):
            once(
                logger,
                logging.WARNING,
                "A request came through a proxy, whose clients count as one. --forwarded-allow-ips with the proxy's "
                "address tells them apart.",
            )
        return self._named(name or network_of(_address(scope)))

    def peer(self, scope: Scope) -> str:
        """As `peer_of`, of a request's connection."""
        return str(scope["state"].get("peer", ""))

    def peer_of(self, address: str) -> str:
        """The name of a connection's peer, whatever its key; empty if all are to be one."""
        return network_of(address) if self._fair else ""

    def blame(self, client: str) -> None:
        """A request of this client made a step fail."""
        if not client:
            return
        times = self._culprits.pop(client, None) or deque[float](maxlen=MAX_CULPRITS)
        times.append(self._clock())
        self._culprits[client] = times
        if len(self._culprits) > _MOST:
            del self._culprits[next(iter(self._culprits))]

    def check(self, client: str) -> None:
        """Refuse a client whose requests have made too many steps fail of late.

        Raises:
            HttpError: 429 with Retry-After.
        """
        times = self._culprits.get(client)
        if times is None or len(times) < MAX_CULPRITS:
            return
        left = times[0] + WINDOW_S - self._clock()
        if left > 0:
            raise HttpError(
                429,
                "Too many of your requests failed while they were computed, which holds up others.",
                "Send none of them again; ask for something else later.",
                code="too_many_failures",
                headers={"Retry-After": str(int(left) + 1)},
            )

    def _named(self, name: str) -> str:
        return hashlib.blake2b(name.encode(), digest_size=8, key=self._secret).hexdigest()


def _address(scope: Scope) -> str:
    return scope["client"][0] if scope.get("client") else ""


def network_of(address: str) -> str:
    """The address of a peer; of IPv6 the network, because one client has all addresses of it."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        mapped = parsed.ipv4_mapped
        return str(mapped) if mapped is not None else str(ipaddress.ip_network((parsed, 64), strict=False))
    return address
