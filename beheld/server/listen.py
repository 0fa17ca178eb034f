"""The socket a server listens at."""

from __future__ import annotations

import socket

from beheld.core.errors import ConfigError
from beheld.server.options import ServerOptions


def listen(options: ServerOptions) -> socket.socket:
    """A listening socket at the address of the options; taken before a model is loaded, so that errors come early.

    Raises:
        ConfigError: the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
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
    return made
