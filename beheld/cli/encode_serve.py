"""`beheld encode-serve MODEL`: the towers of a model, for servers in other processes or on other hosts."""

from __future__ import annotations

import argparse
import signal
import threading
from types import FrameType

from beheld.cli.flags import engine_options
from beheld.core.config import EngineArgs
from beheld.core.errors import ConfigError
from beheld.flags.engine import add_engine_flags

_FLAGS = ("dtype", "quantization", "device", "trust_remote_code", "revision", "download_dir", "hf_overrides")
_DRAIN_S = 30.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("model", metavar="MODEL", help="a folder or a hub name")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen at (default: this machine alone)")
    parser.add_argument("--port", type=int, default=8100, help="the port to listen at (default: 8100)")
    parser.add_argument(
        "--cache-gb", type=float, default=4.0, metavar="GIB", help="embeddings kept in host memory (default: 4)"
    )
    add_engine_flags(parser, names=_FLAGS)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C, which let running answers end."""
    from beheld.encoders.connect import token
    from beheld.engine.encoder_server import EncoderServer, load

    if not 0 <= arguments.cache_gb < 2**20:
        raise ConfigError(f"--cache-gb must be a number from 0, got {arguments.cache_gb:g}.", param="cache_gb")
    secret = token()
    encoder = load(EngineArgs(model=arguments.model, **engine_options(arguments)), int(arguments.cache_gb * 2**30))
    try:
        server = EncoderServer(encoder, secret, (arguments.host, arguments.port))
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"Cannot listen at {arguments.host}:{arguments.port} ({error}).", "Give another --port.", param="port"
        ) from error
    ended = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        ended.set()

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    with server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        host, port = server.server_address[:2]
        print(f"Encoding at http://{host!s}:{port} until Ctrl-C or SIGTERM.", flush=True)
        ended.wait()
        server.drain(_DRAIN_S)
    return 0
