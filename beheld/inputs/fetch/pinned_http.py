"""One HTTP exchange with a checked address: resolved once, checked, and that address dialled.

It uses httpcore, the transport under httpx, whose network interface lets us choose a connection's address while the
certificate is still checked against the name. Everything waits in an event loop, so a timeout or a disconnected client
ends any wait, and a silent server holds no thread. Proxies, cookies, credentials and compression are never used.
"""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import ipaddress
import socket
import ssl
import threading
from collections.abc import Collection, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from typing import Any
from urllib.parse import quote, urlsplit

import httpcore

from beheld.core.errors import FetchError, LimitError, first_line
from beheld.inputs.fetch.shares import Shares
from beheld.utils import env
from beheld.utils.loop_share import LoopShare
from beheld.utils.pace import Pace

# Ranges that carry or lead to other addresses, or that Python counts as global although they are special: IANA's
# registries of special-purpose addresses, regardless of the Python version's list.
_SPECIAL = """
100.64.0.0/10 192.0.0.0/24 192.0.2.0/24 192.31.196.0/24 192.52.193.0/24 192.88.99.0/24 192.175.48.0/24
198.18.0.0/15 198.51.100.0/24 203.0.113.0/24 240.0.0.0/4
::/96 64:ff9b::/96 64:ff9b:1::/48 100::/64 100:0:0:1::/64 2001::/23 2001:db8::/32 2002::/16 2620:4f:8000::/48
3fff::/20 5f00::/16 fc00::/7 fec0::/10
"""
_REFUSED = tuple(map(ipaddress.ip_network, _SPECIAL.split()))
# Names asked for at a time. Each holds a thread, since the system's resolver cannot be interrupted.
_MAX_RESOLVING = 128
# Bytes for which room is made at a time, at first and at most: as many as have come, whatever the server promises.
_FIRST_STEP = 64 << 10
_STEP = 8 << 20
# The total size of an answer's headers, interim answers included.
MAX_HEAD_BYTES = 32 << 10
_HEAD_STEP = 2 << 10
# Pieces of a body that may have any size; each further piece must have this many bytes on average.
MAX_TINY_PIECES = 1024
MIN_PIECE_BYTES = 128
# Smaller pieces take longer to parse than to send: after this many, other fetches get their turn.
_SMALL_BYTES = 1024
_SMALL_PIECES = 16
# Bytes of a chunked body read at a time, and bytes that may hold no content, such as chunk headers or trailers.
_CHUNKED_STEP = 16 << 10
_resolving = threading.BoundedSemaphore(_MAX_RESOLVING)
_UNSAFE = frozenset("\\ \t\r\n\0")


@dataclass(frozen=True)
class Place:
    """A parsed URL without ambiguity."""

    scheme: str
    host: str
    port: int
    target: str


def parse(url: str) -> Place:
    """Parse a URL.

    Raises:
        FetchError: it is malformed, or holds a user name, a backslash, blanks or control characters.
    """
    if any(c in _UNSAFE or ord(c) < 32 or ord(c) == 127 for c in url):
        raise FetchError("The URL holds blanks, backslashes or control characters.", "Percent-encode them.")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise FetchError("The URL is malformed.", detail=first_line(error)) from error
    if parts.username is not None or parts.password is not None:
        raise FetchError("The URL holds a user name or a password.", "Use a URL without them.")
    if not parts.hostname:
        raise FetchError("The URL has no host.")
    try:
        host = parts.hostname.lower().rstrip(".").encode("idna").decode("ascii") if parts.hostname else ""
    except UnicodeError as error:
        raise FetchError("The URL's host is not a valid name.") from error
    # Existing percent-encoding stays; other characters that HTTP does not allow are encoded.
    target = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._")
    if parts.query:
        target += "?" + quote(parts.query, safe="/%:@!$&'()*+,;=~-._?[]{}|^`")
    return Place(parts.scheme.lower(), host, port or (443 if parts.scheme.lower() == "https" else 80), target)


async def address_of(host: str, port: int, shares: Shares) -> str:
    """Resolve once and check every address.

    Raises:
        FetchError: the host is unknown, or one of its addresses is private, loopback, link-local or otherwise special.
    """
    try:
        found = await _resolved(host, port, shares)
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
                    "Send the item itself, for example as a data URL.",
                    or_engine="set BEHELD_ALLOW_PRIVATE_FETCH=1, which allows private and loopback addresses",
                )
    return addresses[0]


async def _resolved(host: str, port: int, shares: Shares) -> list[Any]:
    """The system's answer. A caller that stops waiting leaves the resolver's thread at work until that gives up, and
    its turn lasts as long."""
    end_turn = await shares.resolving()
    loop = asyncio.get_running_loop()
    if not _resolving.acquire(blocking=False):
        end_turn()
        raise FetchError("Too many names are being resolved at the moment.", "Try again.")
    answer: Future[list[Any]] = Future()
    answer.set_running_or_notify_cancel()

    def ask() -> None:
        try:
            answer.set_result(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except Exception as error:
            answer.set_exception(error)
        finally:
            _resolving.release()
            # A loop that was closed counts no turns any more.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(end_turn)

    # Thread.start would wait here, in the event loop, until the thread has had the interpreter and a core.
    _thread.start_new_thread(ask, ())
    return await asyncio.wrap_future(answer)


def is_public(address: str) -> bool:
    """Return whether an address is an ordinary public one."""
    try:
        ip: ipaddress.IPv4Address | ipaddress.IPv6Address = ipaddress.ip_address(address.split("%")[0])
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    if any(ip in network for network in _REFUSED if network.version == ip.version):
        return False
    return ip.is_global and not (ip.is_multicast or ip.is_reserved or ip.is_unspecified or ip.is_link_local)


async def get(
    place: Place,
    max_bytes: int,
    stop_at: Collection[int],
    shares: Shares,
    pace: Pace,
) -> tuple[int, str | None, bytes]:
    """Send one GET request. The caller bounds its time.

    Args:
        place: the parsed URL.
        max_bytes: the limit of the body.
        stop_at: statuses whose body is not read.
        shares: room is reserved of them as the body grows.
        pace: counts what comes, and waiting that is not for the server.

    Returns:
        Status, the Location header, the body.

    Raises:
        FetchError, LimitError: it failed, or was too large.
        TimeoutError: the system's timeout expired.
    """
    address = await address_of(place.host, place.port, shares)
    literal = f"[{place.host}]" if ":" in place.host else place.host
    default = {"https": 443, "http": 80}[place.scheme]
    host = literal if place.port == default else f"{literal}:{place.port}"
    url = httpcore.URL(
        scheme=place.scheme.encode(), host=place.host.encode(), port=place.port, target=place.target.encode()
    )
    headers = [("Host", host), ("User-Agent", "beheld"), ("Accept", "*/*"), ("Accept-Encoding", "identity")]
    context = await asyncio.to_thread(_certificates) if place.scheme == "https" else None
    meter = _Meter(shares.parsing)
    backend = _CheckedBackend(address, meter)
    try:
        async with (
            httpcore.AsyncConnectionPool(ssl_context=context, network_backend=backend, retries=0) as pool,
            pool.stream("GET", url, headers=headers) as response,
        ):
            meter.head_ended()
            fields = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in response.headers}
            if response.status in stop_at:
                return response.status, fields.get("location"), b""
            return response.status, None, await _body(response, fields, max_bytes, shares, pace, meter)
    except (httpcore.TimeoutException, TimeoutError) as error:
        raise TimeoutError from error
    except (httpcore.NetworkError, httpcore.ProtocolError, OSError) as error:
        raise FetchError(f"The server could not be read ({type(error).__name__}).", "Check the URL.") from error


@cache
def _certificates() -> ssl.SSLContext:
    return ssl.create_default_context()


async def _body(
    response: Any,
    fields: dict[str, str],
    max_bytes: int,
    shares: Shares,
    pace: Pace,
    meter: _Meter,
) -> bytes:
    if fields.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise FetchError("The server sent compressed content that was not asked for.")
    length = fields.get("content-length", "")
    known = int(length) if length.isascii() and length.isdigit() and "transfer-encoding" not in fields else None
    if known is not None and known > max_bytes:
        raise LimitError(f"The server would send {known} bytes; the limit is {max_bytes}.")
    largest = max_bytes if known is None else known
    room = 0
    if known is None:
        meter.step = _CHUNKED_STEP
    parts: list[bytes] = []
    total = 0
    async for chunk in response.aiter_stream():
        total += len(chunk)
        if total > max_bytes:
            raise LimitError(f"The server sends more than {max_bytes} bytes.")
        while total > room:
            more = min(max(_FIRST_STEP, room), _STEP, largest - room)
            with pace.waiting():
                await shares.reserve(more)
            room += more
        pace.received(len(chunk))
        parts.append(chunk)
        await meter.piece(len(chunk), len(parts), total)
    return b"".join(parts)


class _Meter:
    """Bounds the cost of parsing one answer, apart from its size, and lets other fetches run meanwhile.

    Attributes:
        step: bytes read at a time.
    """

    def __init__(self, turns: LoopShare) -> None:
        self._turns = turns
        self._in_head = True
        self._empty_bytes = 0
        self._small = 0
        self.step = _HEAD_STEP

    def head_ended(self) -> None:
        """Note that the body begins."""
        self._in_head = False
        self._empty_bytes = 0
        self.step = 64 << 10

    async def read(self, num_bytes: int) -> None:
        """Count bytes that were received and are about to be parsed.

        Raises:
            FetchError: too many came without content.
        """
        if self._in_head or self._empty_bytes:
            await self._turns.turn()
        self._empty_bytes += num_bytes
        if self._in_head and self._empty_bytes > MAX_HEAD_BYTES:
            raise FetchError(f"The server's headers have more than {MAX_HEAD_BYTES} bytes.", "Check the URL.")
        if not self._in_head and self._empty_bytes > self.step + _CHUNKED_STEP:
            raise FetchError("The server sends a body without content.", "Check the URL.")

    async def piece(self, num_bytes: int, num_pieces: int, total_bytes: int) -> None:
        """Count a piece of content, the last of the counted bytes.

        Raises:
            FetchError: the pieces are too small.
        """
        self._empty_bytes = 0
        if num_pieces > MAX_TINY_PIECES + total_bytes // MIN_PIECE_BYTES:
            raise FetchError(
                f"The server sends its body in pieces of fewer than {MIN_PIECE_BYTES} bytes.",
                "Send the item itself, for example as a data URL.",
            )
        self._small += num_bytes < _SMALL_BYTES
        if self._small >= _SMALL_PIECES:
            self._small = 0
            await self._turns.turn()


class _MeteredStream(httpcore.AsyncNetworkStream):
    """A network stream that reports what it reads to a meter."""

    def __init__(self, inner: httpcore.AsyncNetworkStream, meter: _Meter) -> None:
        self._inner = inner
        self._meter = meter

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Read as much as the meter allows at a time."""
        data = await self._inner.read(min(max_bytes, self._meter.step), timeout)
        await self._meter.read(len(data))
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Write to the stream."""
        await self._inner.write(buffer, timeout)

    async def aclose(self) -> None:
        """Close the stream."""
        await self._inner.aclose()

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.AsyncNetworkStream:
        """Start TLS; bytes are counted after decryption."""
        return _MeteredStream(await self._inner.start_tls(ssl_context, server_hostname, timeout), self._meter)

    def get_extra_info(self, info: str) -> Any:
        """Return the stream's extra information."""
        return self._inner.get_extra_info(info)


class _CheckedBackend(httpcore.AsyncNetworkBackend):
    """Connects to one address, whatever the name; a meter counts received bytes."""

    def __init__(self, address: str, meter: _Meter) -> None:
        self._address = address
        self._meter = meter

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Dial the checked address."""
        del host
        stream = await httpcore.AnyIOBackend().connect_tcp(self._address, port, timeout, local_address, socket_options)
        return _MeteredStream(stream, self._meter)
