"""The pages for a browser: small files put into one document, under a policy that allows nothing external."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources

_STYLE = re.compile(r'<link rel="stylesheet" href="([\w.]+)">')
_SCRIPT = re.compile(r'<script src="([\w.]+)"></script>')


@dataclass(frozen=True)
class Page:
    """One document that needs no other request.

    Attributes:
        html: the text, with styles and scripts in place.
        headers: they allow only the page's own scripts and styles, by digest, and requests to this server.
    """

    html: str
    headers: dict[str, str]


@cache
def page(name: str) -> Page:
    """The page of a file of the folder pages/, without ".html": "talk", "dashboard" or "routes"."""
    text = _read(f"{name}.html")
    # Read as files while they are written, and as one document by a browser: nothing else is there to ask for.
    text = _STYLE.sub(lambda found: f"<style>\n{_read(found[1])}</style>", text)
    text = _SCRIPT.sub(lambda found: f"<script>\n{_read(found[1])}</script>", text)
    policy = {
        "default-src": "'none'",
        "script-src": _digests("script", text),
        "style-src": _digests("style", text),
        "img-src": "blob: data:",
        "media-src": "blob: data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    headers = {
        "Content-Security-Policy": "; ".join(f"{part} {value}" for part, value in policy.items()),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return Page(text, headers)


def _read(name: str) -> str:
    return resources.files("beheld.server").joinpath("pages", name).read_text(encoding="utf-8")


def _digests(tag: str, text: str) -> str:
    inside = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(one.encode()).digest()).decode()}'" for one in inside)
