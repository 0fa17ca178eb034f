"""TLS of the server's connections, through uvicorn."""

from __future__ import annotations

import os
import ssl
from typing import Any

from uvicorn.config import create_ssl_context

from beheld.core.errors import ConfigError
from beheld.server.options import ServerOptions


def settings(options: ServerOptions) -> dict[str, Any]:
    """Return uvicorn's options of TLS; none if the server does not speak it.

    Raises:
        ConfigError: a file cannot be read, or does not fit the others.
    """
    if options.ssl_certfile is None:
        return {}
    for option in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"):
        name = getattr(options, option)
        # OpenSSL's error does not say which file it means.
        if name is not None and not os.path.exists(name):
            raise ConfigError(
                f"TLS cannot be set up: there is no file {str(name)!r}.",
                f"Check --{option.replace('_', '-')}.",
                param=option,
            )
    found = {
        "ssl_certfile": options.ssl_certfile,
        "ssl_keyfile": options.ssl_keyfile,
        "ssl_ca_certs": options.ssl_ca_certs,
        "ssl_cert_reqs": options.ssl_cert_reqs,
        **({} if options.ssl_ciphers is None else {"ssl_ciphers": options.ssl_ciphers}),
    }
    try:
        create_ssl_context(
            options.ssl_certfile,
            options.ssl_keyfile,
            # Asked for on the terminal otherwise, which a server may not have.
            password=_NO_PASSWORD,
            ssl_version=ssl.PROTOCOL_TLS_SERVER,
            cert_reqs=options.ssl_cert_reqs,
            ca_certs=options.ssl_ca_certs,
            ciphers=options.ssl_ciphers,
        )
    except (OSError, ValueError) as error:
        words = getattr(error, "strerror", None) or getattr(error, "reason", None) or error
        raise ConfigError(
            f"TLS cannot be set up: {words}.",
            "Check --ssl-certfile, --ssl-keyfile, --ssl-ca-certs and --ssl-ciphers; the key must have no password.",
            param="ssl_certfile",
        ) from error
    return found


_NO_PASSWORD = " "
