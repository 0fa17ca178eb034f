"""Takes off what a proxy before the server lets the addresses of requests begin with."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class RootPath:
    """Serves the same routes below a root, and without it, for proxies that take it off.

    Args:
        app: the application.
        root: begins with a slash and ends without one; empty for none.
    """

    def __init__(self, app: ASGIApp, root: str) -> None:
        self._app, self._root = app, root

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application."""
        if self._root and scope["type"] == "http" and scope["path"].startswith(f"{self._root}/"):
            raw = scope["raw_path"].decode("latin-1").removeprefix(self._root)
            scope = {**scope, "path": scope["path"].removeprefix(self._root), "raw_path": raw.encode("latin-1")}
        await self._app(scope, receive, send)
