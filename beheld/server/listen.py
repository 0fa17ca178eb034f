"""The server's listening socket."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from pathlib import Path

from beheld.core.errors import ConfigError
from beheld.server import tls
from beheld.server.options import ServerOptions
from beheld.utils.log import get_logger

logger = get_logger(__name__)


# Connections that may wait to be accepted, as far as the system allows.
_QUEUE = 4096


def listen(options: ServerOptions) -> socket.socket:
    """Open a listening socket at the address in the options, before the model is loaded, so that errors show early.

    So do errors of TLS.

    Logs a warning if other machines can use the server without a key.

    Raises:
        ConfigError: the address is not available, or TLS cannot be set up.
    """
    tls.settings(options)
    if options.uds is not None:
        return _listen_at_file(Path(options.uds))
    made = bound(options.host, options.port)
    if not options.api_keys and not is_own(made.getsockname()[0]):
        logger.warning(
            "Anyone who reaches %s can use this server: the address is not local, and no --api-key is set.",
            options.host,
        )
    return made


def bound(host: str, port: int) -> socket.socket:
    """A socket that listens at an address.

    Raises:
        ConfigError: the address is not available.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((host, port))
        made.listen(_QUEUE)
    except OSError as error:
        made.close()
        raise ConfigError(
            f"Cannot listen at {host} port {port}: {error.strerror or error}.",
            "Choose another --port or --host.",
            param="port",
        ) from error
    made.set_inheritable(False)
    return made


def _listen_at_file(path: Path) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket() and not _answers(path):
            # What an earlier server left.
            path.unlink()
        made.bind(str(path))
        made.listen(_QUEUE)
    except OSError as error:
        made.close()
        raise ConfigError(
            f"Cannot listen at {str(path)!r}: {error.strerror or error}.", "Choose another --uds.", param="uds"
        ) from error
    made.set_inheritable(False)
    return made


def _answers(path: Path) -> bool:
    """True if somebody listens at a Unix socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asked:
        try:
            asked.connect(str(path))
        except OSError:
            return False
        return True


def address(listener: socket.socket, options: ServerOptions) -> str:
    """Return where a listening socket can be reached, as an address of the web or a file."""
    if listener.family == socket.AF_UNIX:
        return f"the Unix socket {listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    scheme = "http" if options.ssl_certfile is None else "https"
    shown = f"[{host}]" if ":" in host else host
    return f"{scheme}://{shown}:{port}{options.root_path}"


def leave(listener: socket.socket) -> None:
    """Remove the file of a Unix socket whose server has ended."""
    if listener.family == socket.AF_UNIX:
        with contextlib.suppress(OSError):
            Path(listener.getsockname()).unlink()


def is_own(address: str) -> bool:
    """True for a loopback address or name, which only this machine can reach."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address.lower() == "localhost"
    mapped = getattr(found, "ipv4_mapped", None)
    return (mapped or found).is_loopback
