"""Fetches embeddings from encoders elsewhere, before a request is submitted."""

from __future__ import annotations

import hashlib
import http.client
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from beheld.core.errors import ConfigError
from beheld.core.media import ENCODED, MediaItem
from beheld.core.plan import EncodeItem
from beheld.encoders.messages import MODEL_HEADER, PATH, Ask, Found, packed, unpacked
from beheld.utils.log import get_logger
from beheld.utils.lru import LRU

logger = get_logger(__name__)

_CONNECT_S = 2.0
_ANSWER_S = 30.0
# An encoder that did not answer is not asked again for so long.
_AWAY_S = 5.0
# A question and its answer may take so long in all, and longer by the time that their bytes take over a slow link.
_WHOLE_S, _BYTES_A_SECOND = 60.0, 1 << 20
_KEPT_BYTES = 256 << 20
_MOST_BYTES = 2 << 30


class _Away(Exception):
    """The encoder does not answer, or not as it should; the text says why."""


# ValueError: a malformed body.
_FAULTS = (_Away, OSError, http.client.HTTPException, ValueError)


@dataclass(eq=False)
class _Encoder:
    """An encoder, and until when it is not asked (seconds of a monotonic clock)."""

    url: str
    away_until: float = 0.0


class RemoteEncoders:
    """Replaces features of media by embeddings that encoders elsewhere give. Safe to use from several threads.

    An item always asks the same encoder, so that one that is shown again is found there. If that encoder is away, the
    item keeps its features, and the engine's own towers run.

    Args:
        urls: of the encoders, as "http://10.0.0.5:8100".
        token: the secret that clients and encoders share.
        model: see `model_of`.
        dtype: of the embeddings, as "bfloat16".

    Raises:
        ConfigError: a URL is malformed, or an encoder refuses the token or has other weights.
    """

    def __init__(self, urls: Sequence[str], token: str, model: str, dtype: str) -> None:
        for url in urls:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ConfigError(
                    f"{url!r} is no address of an encoder.", "Write http://HOST:PORT.", param="encoder_urls"
                )
        self._encoders = [_Encoder(url.rstrip("/")) for url in urls]
        self._headers = {
            "Authorization": f"Bearer {token}",
            MODEL_HEADER: model,
            "Content-Type": "application/octet-stream",
        }
        self._dtype = f"torch.{dtype}"
        self._kept: LRU[bytes, Any] = LRU(_KEPT_BYTES)
        self._local = threading.local()
        for encoder in self._encoders:
            try:
                self._found(encoder, Ask((), ()))
            except ConfigError:
                raise
            except _FAULTS as error:
                self._leave(encoder, error)

    def replaced(self, items: Sequence[MediaItem]) -> list[MediaItem]:
        """Return the items, each with its embeddings in place of its features if an encoder gave them."""
        wanted = {item.digest: item for item in items if item.num_embeds and "embeds" not in item.features}
        found = {digest: kept for digest in wanted if (kept := self._kept.get(digest)) is not None}
        for encoder in self._encoders:
            own = [wanted[d] for d in wanted if d not in found and self._encoder_of(d) is encoder]
            if own and time.monotonic() >= encoder.away_until:
                found |= self._fetched(encoder, own)
        return [_with(item, found[item.digest]) if item.digest in found else item for item in items]

    def replaced_all(self, items: Mapping[str, Sequence[MediaItem]]) -> dict[str, list[MediaItem]]:
        """Return a request's items by modality, as `replaced` does; one question asks an encoder for all of them."""
        each = iter(self.replaced([item for own in items.values() for item in own]))
        return {modality: [next(each) for _ in own] for modality, own in items.items()}

    def _encoder_of(self, digest: bytes) -> _Encoder:
        """The encoder of a digest: the same for all clients, and moved for few digests if the list changes."""
        return max(self._encoders, key=lambda each: hashlib.sha256(each.url.encode() + digest).digest())

    def _fetched(self, encoder: _Encoder, items: Sequence[MediaItem]) -> dict[bytes, Any]:
        """Ask by digest, then send the features of what the encoder does not have."""
        digests = [item.digest for item in items]
        known = dict(zip(digests, self._ask(encoder, Ask(tuple(digests), ())) or [None] * len(digests), strict=True))
        missing = [item for item in items if known[item.digest] is None]
        if missing and time.monotonic() >= encoder.away_until:
            sent = tuple(EncodeItem(each.digest, each.modality, each.features, each.num_kept) for each in missing)
            made = self._ask(encoder, Ask((), sent)) or [None] * len(missing)
            known |= {item.digest: embeds for item, embeds in zip(missing, made, strict=True)}
        good = {item.digest: known[item.digest] for item in items if self._fits(encoder, item, known[item.digest])}
        for digest, embeds in good.items():
            self._kept.put(digest, embeds, embeds.nbytes)
        return good

    def _fits(self, encoder: _Encoder, item: MediaItem, embeds: Any) -> bool:
        if embeds is None:
            return False
        if embeds.dim() == 2 and embeds.shape[0] == item.num_embeds and str(embeds.dtype) == self._dtype:
            return True
        logger.warning("The encoder %s gave embeddings of a wrong shape or data type.", encoder.url)
        return False

    def _ask(self, encoder: _Encoder, ask: Ask) -> list[Any] | None:
        """Return an encoder's embeddings; None if it is away or refuses, which is logged."""
        try:
            return self._found(encoder, ask)
        except (ConfigError, *_FAULTS) as error:
            self._leave(encoder, error)
            return None

    def _found(self, encoder: _Encoder, ask: Ask) -> list[Any]:
        found = unpacked(self._exchanged(encoder, packed(ask)))
        if not isinstance(found, Found) or len(found.embeds) != len(ask.digests) + len(ask.items):
            raise _Away("its answer is malformed")
        return list(found.embeds)

    def _leave(self, encoder: _Encoder, error: Exception) -> None:
        """Ask an encoder no more for a while, and say why."""
        self._drop(encoder)
        encoder.away_until = time.monotonic() + _AWAY_S
        reason = str(error) or type(error).__name__
        logger.warning("The encoder %s is away (%s); this engine's towers encode.", encoder.url, reason)

    def _exchanged(self, encoder: _Encoder, body: bytes) -> bytearray:
        """Send a body and return the answer's. A connection that the encoder has closed meanwhile is made again."""
        connection = self._connections().get(encoder.url)
        if connection is not None:
            try:
                return self._answered(encoder, connection, body)
            except (ConnectionError, http.client.BadStatusLine):
                self._drop(encoder)
        connection = _connected(encoder.url)
        self._connections()[encoder.url] = connection
        return self._answered(encoder, connection, body)

    def _answered(self, encoder: _Encoder, connection: http.client.HTTPConnection, body: bytes) -> bytearray:
        sending_s = len(body) / _BYTES_A_SECOND
        until = time.monotonic() + _WHOLE_S + sending_s
        # An answer that ends with its connection takes the socket from it.
        sock = connection.sock
        sock.settimeout(_ANSWER_S + sending_s)
        with _cut_at(sock, until):
            connection.request("POST", urlsplit(encoder.url).path + PATH, body, self._headers)
            response = connection.getresponse()
        if response.status in (401, 409):
            self._drop(encoder)
            what = "refuses the token" if response.status == 401 else "has other weights, or another dtype"
            what_to_do = (
                "Give both the same BEHELD_ENCODER_TOKEN." if response.status == 401
                else "Start it with the same MODEL, --dtype and --quantization."
            )  # fmt: skip
            raise ConfigError(f"The encoder {encoder.url} {what}.", what_to_do, param="encoder_urls")
        if response.status != 200:
            raise _Away(f"it answered with status {response.status}")
        size = int(response.headers.get("Content-Length", _MOST_BYTES + 1))
        if not 0 <= size <= _MOST_BYTES:
            raise _Away(f"its answer has {size} bytes")
        found = bytearray(size)
        view, got = memoryview(found), 0
        with _cut_at(sock, until + size / _BYTES_A_SECOND):
            while got < size:
                count = response.readinto(view[got:])
                if not count:
                    raise _Away("its answer is cut off")
                got += count
            response.read()
        return found

    def _connections(self) -> dict[str, http.client.HTTPConnection]:
        """This thread's connections, by URL."""
        if not hasattr(self._local, "connections"):
            self._local.connections = {}
        found: dict[str, http.client.HTTPConnection] = self._local.connections
        return found

    def _drop(self, encoder: _Encoder) -> None:
        connection = self._connections().pop(encoder.url, None)
        if connection is not None:
            connection.close()


@contextmanager
def _cut_at(sock: socket.socket, until: float) -> Iterator[None]:
    """Within the block, the connection is cut at a time of time.monotonic: the socket's own limit is for each piece."""

    def cut() -> None:
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(max(0.0, until - time.monotonic()), cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _connected(url: str) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    assert parts.hostname is not None
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname, parts.port, timeout=_CONNECT_S)
    connection.connect()
    connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sock.settimeout(_ANSWER_S)
    return connection


def _with(item: MediaItem, embeds: Any) -> MediaItem:
    return replace(item, features={ENCODED: embeds}, feature_bytes=embeds.nbytes)
