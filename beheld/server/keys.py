"""The API key: required on every route except /health, compared in constant time."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from beheld.server.errors import HttpError

OPEN_PATHS = frozenset({"/health"})


class KeyGuard:
    """Lets a request pass if it has one of the keys: as a bearer token, as `x-api-key` (as Anthropic's clients send it)
    or as the password of basic authentication.

    It runs before the routes, so unknown routes and OPTIONS requests also need a key. Browsers show the page at /
    through basic authentication: any user name, the key as password.
    """

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self._app = app
        self._digests = tuple(_digest(key.encode()) for key in keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application, or respond with 401."""
        if scope["type"] == "http" and self._digests:
            given = key_of(scope)
            known = given is not None and self._known(given)
            if not known and scope["path"] not in OPEN_PATHS:
                headers = {"WWW-Authenticate": 'Bearer realm="beheld", Basic realm="beheld"', "Connection": "close"}
                error = HttpError(
                    401,
                    "The API key is missing or wrong.",
                    "Send it as Authorization: Bearer KEY, or as x-api-key: KEY.",
                    headers=headers,
                )
                await error.response()(scope, receive, send)
                return
            if given is not None and known:
                scope["state"]["client"] = _digest(given).hex()[:32]
        await self._app(scope, receive, send)

    def _known(self, given: bytes) -> bool:
        # Compares all digests, which have equal length, so the time reveals neither the key's length nor a near match.
        digest = _digest(given)
        return sum([hmac.compare_digest(digest, known) for known in self._digests]) > 0


def key_of(scope: Scope) -> bytes | None:
    """The key of a request; None if it has none, or two headers of which one is no key or another key."""
    sent = [(name, value) for name, value in scope["headers"] if name in (b"authorization", b"x-api-key")]
    if len(sent) != len(dict(sent)):
        return None
    keys = {value if name == b"x-api-key" else _authorized(value) for name, value in sent}
    return keys.pop() if len(keys) == 1 else None


def _authorized(value: bytes) -> bytes | None:
    """The key of an Authorization header; None if it has none."""
    scheme, _, rest = value.partition(b" ")
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
