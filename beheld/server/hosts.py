"""Which names a server may be asked under that only this machine can reach, and that asks for no key.

A page from anywhere may give its own name the address 127.0.0.1 once a browser has loaded it (DNS rebinding). To that
browser the server is then the page's own, which may ask and read what it likes. It shows in the name that is asked for.
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
    """Refuses requests for names that a stranger can own. Addresses are no names, and names without a dot belong to
    nobody outside.
    """

    def __init__(self, app: ASGIApp, options: ServerOptions) -> None:
        self._app = app
        self._known = frozenset(name.lower() for name in options.allowed_hosts)
        self._asks = not options.api_keys and is_own(options.host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or answer 400."""
        if self._asks and scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            name = _name(next((value for key, value in scope["headers"] if key == b"host"), b""))
            if name not in self._known and not _harmless(name):
                error = HttpError(
                    400,
                    "This server is not asked under that name.",
                    "Ask 127.0.0.1 or localhost. The operator may start it with --allowed-hosts NAME, or --api-key.",
                    code="wrong_host",
                    headers={"Connection": "close"},
                )
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _name(host: bytes) -> str:
    """The header's name, without its port and in small letters; "." of what holds none."""
    found = _HOST.fullmatch(host.decode("latin-1").lower())
    return "." if found is None else found[1].strip("[]").removesuffix(".")


def _harmless(name: str) -> bool:
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return "." not in name or name.endswith(".localhost")
    return True
