"""Checks the Host header of a server without keys that only this machine can reach.

A web page can give its own name the address 127.0.0.1 after a browser has loaded it (DNS rebinding). The browser then
takes the server for the page's own site and lets the page send requests and read responses. The Host header still has
the page's name.
"""

from __future__ import annotations

import ipaddress
import re

from starlette.types import ASGIApp, Receive, Scope, Send

from beheld.server.errors import HttpError
from beheld.server.keys import OPEN_PATHS
from beheld.server.listen import is_own
from beheld.server.options import ServerOptions

_HOST = re.compile(r"(\[[^][]*\]|[^][:/@]*)(?::[0-9]*)?")


class HostGuard:
    """Refuses requests for host names that an outsider can own.

    Addresses are allowed, and so are names without a dot, which no outsider can own.
    """

    def __init__(self, app: ASGIApp, options: ServerOptions) -> None:
        self._app = app
        self._known = frozenset(name.lower() for name in options.allowed_hosts)
        self._asks = not options.api_keys and is_own(options.host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application, or respond with 400."""
        if self._asks and scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            name = _name(next((value for key, value in scope["headers"] if key == b"host"), b""))
            if name not in self._known and not _harmless(name):
                error = HttpError(
                    400,
                    "This server does not answer under that host name.",
                    "Use 127.0.0.1 or localhost. The operator may start it with --allowed-hosts NAME, or --api-key.",
                    code="wrong_host",
                    headers={"Connection": "close"},
                )
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _name(host: bytes) -> str:
    """The host name in lower case, without its port; "." if the header has none."""
    found = _HOST.fullmatch(host.decode("latin-1").lower())
    return "." if found is None else found[1].strip("[]").removesuffix(".")


def _harmless(name: str) -> bool:
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return "." not in name or name.endswith(".localhost")
    return True
