"""The API key: asked for on every route but /health, compared in constant time."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from beheld.server.errors import HttpError

OPEN_PATHS = frozenset({"/health"})


class KeyGuard:
    """Lets a request through if it holds one of the keys: as a bearer token, or as the password of basic access.

    It stands before the routes, so that what is not a route, and what asks for options, also needs a key. Browsers
    show the page at / through basic access: any user name, the key as password.
    """

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self._app = app
        self._digests = tuple(_digest(key.encode()) for key in keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or answer 401."""
        if scope["type"] == "http" and self._digests:
            given = key_of(scope)
            known = given is not None and self._known(given)
            if not known and scope["path"] not in OPEN_PATHS:
                headers = {"WWW-Authenticate": 'Bearer realm="beheld", Basic realm="beheld"', "Connection": "close"}
                error = HttpError(
                    401, "The API key is missing or wrong.", "Send it as Authorization: Bearer KEY.", headers=headers
                )
                await error.response()(scope, receive, send)
                return
            if given is not None and known:
                scope["state"]["client"] = _digest(given).hex()[:32]
        await self._app(scope, receive, send)

    def _known(self, given: bytes) -> bool:
        # Digests of equal length, all of them compared: time tells neither the length nor which key was near.
        digest = _digest(given)
        return sum([hmac.compare_digest(digest, known) for known in self._digests]) > 0


def key_of(scope: Scope) -> bytes | None:
    """The key that a request shows; None if it shows none, or two."""
    shown = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(shown) != 1:
        return None
    scheme, _, rest = shown[0].partition(b" ")
    rest = rest.strip()
    if scheme.lower() == b"bearer":
        return rest
    if scheme.lower() != b"basic":
        return None
    try:
        _, colon, password = base64.b64decode(rest, validate=True).partition(b":")
    except (binascii.Error, ValueError):
        return None
    return password if colon else None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
