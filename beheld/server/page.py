"""The page at /: one file without outside parts, shown under a policy that allows none."""

from __future__ import annotations

from functools import cache
from importlib import resources

_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src blob: data:; "
    "media-src blob: data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@cache
def html() -> str:
    """The file."""
    return resources.files("beheld.server").joinpath("playground.html").read_text(encoding="utf-8")
