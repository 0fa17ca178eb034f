"""The socket a server listens at."""

from __future__ import annotations

import errno
import ipaddress
import socket
from typing import Any

from beheld.core.errors import ConfigError
from beheld.server.options import ServerOptions
from beheld.utils.log import get_logger

logger = get_logger(__name__)


_EXHAUSTED = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))


class Listener(socket.socket):
    """A socket that is asked for connections again and again in one go, as asyncio asks, but not once there are no
    descriptors left: asyncio would try a thousand times, say so each time, and plan as many retries.
    """

    _exhausted = False

    def accept(self) -> tuple[socket.socket, Any]:
        """As a socket's; after an error for want of descriptors there seems to be no connection, once."""
        if self._exhausted:
            self._exhausted = False
            raise BlockingIOError
        try:
            return super().accept()
        except OSError as error:
            self._exhausted = error.errno in _EXHAUSTED
            raise


def listen(options: ServerOptions) -> socket.socket:
    """A listening socket at the address of the options; taken before a model is loaded, so that errors come early.

    Warns if anyone who reaches this machine may ask.

    Raises:
        ConfigError: the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    made = Listener(family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((options.host, options.port))
        made.listen(1024)
    except OSError as error:
        made.close()
        raise ConfigError(
            f"Cannot listen at {options.host} port {options.port}: {error.strerror or error}.",
            "Choose another --port or --host.",
            param="port",
        ) from error
    made.set_inheritable(False)
    if not options.api_keys and not is_own(made.getsockname()[0]):
        logger.warning(
            "Anyone who reaches %s can use this server: it is not this machine's own address, and no --api-key is set.",
            options.host,
        )
    return made


def is_own(address: str) -> bool:
    """True for an address at which only this machine can be asked, or for the name that every machine has for it."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address.lower() == "localhost"
    mapped = getattr(found, "ipv4_mapped", None)
    return (mapped or found).is_loopback
