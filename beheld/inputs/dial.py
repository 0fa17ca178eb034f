"""One HTTP exchange with a checked address: resolved once, checked, and that very address dialled.

It stands on httpcore, the transport under httpx, because its network seam lets us choose the address of a connection
while the certificate is still checked against the name, and lets one deadline bound every wait: a server that sends a
byte a second cannot hold a fetch longer than its time. No proxy, cookie, credential or compression is ever used.
"""

from __future__ import annotations

import ipaddress
import socket
import ssl
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

import httpcore

from beheld.core.errors import FetchError, LimitError
from beheld.utils import env

# Ranges that carry or lead to other addresses, or that Python counts as global though they are not for us.
_REFUSED = tuple(
    ipaddress.ip_network(text)
    for text in ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32", "fec0::/10", "::/96", "100.64.0.0/10")
)
_UNSAFE = frozenset("\\ \t\r\n\0")


@dataclass(frozen=True)
class Place:
    """A URL taken apart, with nothing ambiguous left in it."""

    scheme: str
    host: str
    port: int
    target: str


def parse(url: str) -> Place:
    """Take a URL apart.

    Raises:
        FetchError: it is malformed, or holds a user name, a backslash, blanks or control characters.
    """
    if any(c in _UNSAFE or ord(c) < 32 or ord(c) == 127 for c in url):
        raise FetchError("The URL holds blanks, backslashes or control characters.", "Percent-encode them.")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise FetchError(f"The URL is malformed: {error}.") from error
    if parts.username is not None or parts.password is not None:
        raise FetchError("The URL holds a user name or a password.", "Use a URL without them.")
    if not parts.hostname:
        raise FetchError("The URL names no host.")
    try:
        host = parts.hostname.lower().rstrip(".").encode("idna").decode("ascii") if parts.hostname else ""
    except UnicodeError as error:
        raise FetchError("The URL's host is not a valid name.") from error
    # What is already encoded stays; anything else that HTTP does not allow is encoded.
    target = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._")
    if parts.query:
        target += "?" + quote(parts.query, safe="/%:@!$&'()*+,;=~-._?[]{}|^`")
    return Place(parts.scheme.lower(), host, port or (443 if parts.scheme.lower() == "https" else 80), target)


def address_of(host: str, port: int) -> str:
    """Resolve once and check every address.

    Raises:
        FetchError: the host is unknown, or one of its addresses is private, loopback, link-local or otherwise special.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise FetchError(f"The host {host!r} cannot be resolved.", "Check the URL and the network.") from error
    addresses = [str(entry[4][0]) for entry in found]
    if not addresses:
        raise FetchError(f"The host {host!r} has no address.")
    if not env.ALLOW_PRIVATE_FETCH():
        for address in addresses:
            if not is_public(address):
                raise FetchError(
                    f"The host {host!r} has an address that is not public.",
                    "Set BEHELD_ALLOW_PRIVATE_FETCH=1 to allow private and loopback addresses.",
                )
    return addresses[0]


def is_public(address: str) -> bool:
    """True for an ordinary address of the public internet."""
    try:
        ip: ipaddress.IPv4Address | ipaddress.IPv6Address = ipaddress.ip_address(address.split("%")[0])
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    if any(ip in network for network in _REFUSED if network.version == ip.version):
        return False
    return ip.is_global and not (ip.is_multicast or ip.is_reserved or ip.is_unspecified or ip.is_link_local)


def get(place: Place, deadline: float, max_bytes: int, stop_at: Collection[int]) -> tuple[int, str | None, bytes]:
    """One GET.

    Args:
        place: where.
        deadline: on the monotonic clock.
        max_bytes: of the body.
        stop_at: statuses whose body is not read.

    Returns:
        Status, the Location header, the body.

    Raises:
        FetchError, LimitError: it failed, took too long, or was too large.
    """
    address = address_of(place.host, place.port)
    literal = f"[{place.host}]" if ":" in place.host else place.host
    default = {"https": 443, "http": 80}[place.scheme]
    host = literal if place.port == default else f"{literal}:{place.port}"
    url = httpcore.URL(
        scheme=place.scheme.encode(), host=place.host.encode(), port=place.port, target=place.target.encode()
    )
    headers = [("Host", host), ("User-Agent", "beheld"), ("Accept", "*/*"), ("Accept-Encoding", "identity")]
    context = ssl.create_default_context() if place.scheme == "https" else None
    backend = _CheckedBackend(address, deadline)
    try:
        with (
            httpcore.ConnectionPool(ssl_context=context, network_backend=backend, retries=0) as pool,
            pool.stream("GET", url, headers=headers) as response,
        ):
            fields = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in response.headers}
            if response.status in stop_at:
                return response.status, fields.get("location"), b""
            return response.status, None, _body(response, fields, max_bytes)
    except (httpcore.TimeoutException, TimeoutError) as error:
        raise FetchError("The server took too long.", "Raise BEHELD_IMAGE_FETCH_TIMEOUT or its siblings.") from error
    except (httpcore.NetworkError, httpcore.ProtocolError, OSError) as error:
        raise FetchError(f"The server could not be read ({type(error).__name__}).", "Check the URL.") from error


def _body(response: Any, fields: dict[str, str], max_bytes: int) -> bytes:
    if fields.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise FetchError("The server sent compressed content that was not asked for.")
    length = fields.get("content-length", "")
    if length.isdigit() and int(length) > max_bytes:
        raise LimitError(f"The server would send {length} bytes; the limit is {max_bytes}.")
    parts: list[bytes] = []
    total = 0
    for chunk in response.iter_stream():
        total += len(chunk)
        if total > max_bytes:
            raise LimitError(f"The server sends more than {max_bytes} bytes.")
        parts.append(chunk)
    return b"".join(parts)


class _CheckedBackend(httpcore.NetworkBackend):
    """Connects to one address, whatever the name, until one deadline."""

    def __init__(self, address: str, deadline: float) -> None:
        self._address = address
        self._deadline = deadline

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        """Dial the checked address."""
        del host, timeout
        inner = httpcore.SyncBackend().connect_tcp(
            self._address, port, _left(self._deadline), local_address, socket_options
        )
        return _BoundStream(inner, self._deadline)


class _BoundStream(httpcore.NetworkStream):
    """A connection all of whose waits end at one deadline."""

    def __init__(self, inner: httpcore.NetworkStream, deadline: float) -> None:
        self._inner = inner
        self._deadline = deadline

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Read what has come."""
        del timeout
        return self._inner.read(max_bytes, _left(self._deadline))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Write all."""
        del timeout
        self._inner.write(buffer, _left(self._deadline))

    def close(self) -> None:
        """Hang up."""
        self._inner.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        """Encrypt; the certificate must be that of the name."""
        del timeout
        return _BoundStream(self._inner.start_tls(ssl_context, server_hostname, _left(self._deadline)), self._deadline)

    def get_extra_info(self, info: str) -> Any:
        """Details of the connection."""
        return self._inner.get_extra_info(info)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise httpcore.ReadTimeout("the deadline has passed")
    return left
