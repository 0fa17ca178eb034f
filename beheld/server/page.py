"""The page at /: one self-contained file, under a content security policy that allows nothing external."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib import resources


@cache
def html() -> str:
    """The file's text."""
    return resources.files("beheld.server").joinpath("playground.html").read_text(encoding="utf-8")


@cache
def headers() -> dict[str, str]:
    """Headers for the page: they allow only its own script and style, by digest, and requests to this server."""
    policy = {
        "default-src": "'none'",
        "script-src": _digest("script"),
        "style-src": _digest("style"),
        "img-src": "blob: data:",
        "media-src": "blob: data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }


def _digest(tag: str) -> str:
    (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>", html(), re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()}'"
