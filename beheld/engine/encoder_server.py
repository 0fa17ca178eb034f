"""Serves embeddings of media over HTTP: the towers of a model, without its text layers."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from beheld.checkpoint.info import read_config, read_info
from beheld.checkpoint.resolve import fetch_weights, resolve
from beheld.checkpoint.validate import validate
from beheld.core.config import EngineArgs
from beheld.core.errors import ConfigError
from beheld.core.plan import EncodeItem
from beheld.encoders.connect import encodes_apart
from beheld.encoders.messages import MODEL_HEADER, PATH, Ask, Found, is_token, model_of, packed, unpacked
from beheld.engine.setup import check, decide
from beheld.executor.towers import Towers
from beheld.utils.log import get_logger
from beheld.utils.lru import LRU

logger = get_logger(__name__)

_MOST_BYTES = 2 << 30
_IDLE_S = 60.0
# Each connection has a thread and a descriptor, before it has shown the token, too.
_MOST_CONNECTIONS = 512


class Encoder:
    """Embeddings by digest: those kept in host memory, and those that the towers make now.

    Args:
        towers: the model's.
        kept_bytes: limit of the embeddings that are kept.

    Attributes:
        num_encoded: items that the towers have encoded.
    """

    def __init__(self, towers: Towers, model: str, kept_bytes: int) -> None:
        self.model = model
        self.num_encoded = 0
        self._towers = towers
        self._kept: LRU[bytes, Any] = LRU(kept_bytes)
        self._turn = threading.Lock()

    def answer(self, ask: Ask) -> Found:
        """Return what is asked for; None where it is unknown, or a tower failed."""
        made: dict[bytes, Any] = {}
        with self._turn:
            waiting: dict[bytes, EncodeItem] = {}
            for item in ask.items:
                kept = self._kept.get(item.digest)
                if kept is None:
                    waiting[item.digest] = item
                else:
                    made[item.digest] = kept
            if waiting:
                self.num_encoded += len(waiting)
                for digest, embeds in self._towers.encode(list(waiting.values())).items():
                    made[digest] = embeds
                    self._kept.put(digest, embeds, embeds.nbytes)
        return Found((*map(self._kept.get, ask.digests), *(made.get(item.digest) for item in ask.items)))


def load(args: EngineArgs, kept_bytes: int) -> Encoder:
    """Load the towers of a model.

    Raises:
        ConfigError, ModelError, CapacityError: the message says what to do.
    """
    check(args)
    if args.load_format == "dummy":
        raise ConfigError("Random weights are no encoder's.", "Leave --load-format out.", param="load_format")
    path = resolve(args)
    validate(path, args)
    info = read_info(path, args, read_config(path, args))
    if not encodes_apart(info):
        raise ConfigError(
            f"{info.name!r} ({info.architecture}) has no towers whose embeddings enter the text.",
            "Serve it whole, with beheld serve.",
            param="model",
        )
    fetch_weights(args, Path(info.path))
    config = decide(args, info)
    towers = Towers.load(lambda: read_config(path, args), lambda hf_config: read_info(path, args, hf_config), config)
    return Encoder(towers, model_of(info, config), kept_bytes)


class EncoderServer(ThreadingHTTPServer):
    """Answers POST /embeddings with the token, and GET /health.

    Args:
        encoder: of the model.
        token: the secret that clients send.
        address: host and port; port 0 takes a free one.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, encoder: Encoder, token: str, address: tuple[str, int]) -> None:
        self.encoder, self.token = encoder, token
        self._busy = 0
        # Connections of clients; they stay open between requests.
        self.open: set[socket.socket] = set()
        self._changed = threading.Condition()
        super().__init__(address, _Handler)

    def __enter__(self) -> EncoderServer:
        return self

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Take no more connections than there may be; others are closed at once."""
        return len(self.open) < _MOST_CONNECTIONS

    def process_request(self, request: Any, client_address: Any) -> None:
        """Count the connection before its thread starts."""
        self.open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Count it no more, and close it."""
        self.open.discard(request)
        super().shutdown_request(request)

    def begin(self) -> None:
        """Count a request that is being answered."""
        with self._changed:
            self._busy += 1

    def end(self) -> None:
        """Its answer is sent."""
        with self._changed:
            self._busy -= 1
            self._changed.notify_all()

    def drain(self, timeout_s: float) -> None:
        """Accept no more connections, wait for the answers that are being made, and close all connections."""
        self.shutdown()
        with self._changed:
            self._changed.wait_for(lambda: self._busy == 0, timeout_s)
        for connection in list(self.open):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    server: EncoderServer
    protocol_version = "HTTP/1.1"
    timeout = _IDLE_S
    disable_nagle_algorithm = True
    wbufsize = -1

    def do_GET(self) -> None:
        self._send(200 if self.path == "/health" else 404)

    def do_POST(self) -> None:
        # The body of a request without the token is not read.
        if not is_token(self.headers.get("Authorization"), self.server.token):
            return self._refuse(401)
        if self.path != PATH:
            return self._refuse(404)
        if self.headers.get(MODEL_HEADER) != self.server.encoder.model:
            return self._refuse(409)
        text = self.headers.get("Content-Length", "")
        if not text.isascii() or not text.isdigit() or int(text) > _MOST_BYTES:
            return self._refuse(413)
        self.server.begin()
        try:
            body = self.rfile.read(int(text))
            if len(body) < int(text):
                return self._refuse(400)
            try:
                ask = unpacked(body)
                if not isinstance(ask, Ask):
                    raise ValueError("it is no question")
            except ValueError:
                return self._refuse(400)
            self._send(200, packed(self.server.encoder.answer(ask)))
        except Exception:
            logger.exception("A question was not answered.")
            self._refuse(500)
        finally:
            self.server.end()

    def _refuse(self, status: int) -> None:
        self.close_connection = True
        self._send(status)

    def _send(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)
