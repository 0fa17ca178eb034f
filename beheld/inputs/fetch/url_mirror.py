"""Local copies of URLs: a folder that is searched before the network, for machines without network access.

BEHELD_MEDIA_CACHE names the folder. The copy of `https://host/some/path%20x.jpg?y=1` is the file
`host/some/path%20x.jpg?y=1` below it; `wget -x` stores files this way with the path decoded, which is found too. Only
the machine's owner writes there; beheld reads.
"""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import unquote

from beheld.inputs.fetch.pinned_http import Place
from beheld.utils import env

_DEFAULT_PORTS = {"http": 80, "https": 443}


def places(place: Place) -> tuple[str, ...]:
    """Return the candidate paths of a URL's copy below the folder; none for a URL with parent segments."""
    host = place.host if place.port == _DEFAULT_PORTS.get(place.scheme) else f"{place.host}:{place.port}"
    plain = place.target.lstrip("/")
    return tuple(
        f"{host}/{path}" for path in dict.fromkeys((plain, unquote(plain))) if path and _stays_below(f"{host}/{path}")
    )


def find(place: Place) -> str | None:
    """Return the path of a URL's copy; None if there is no copy or no folder."""
    folder = env.MEDIA_CACHE()
    if not folder:
        return None
    root = Path(folder).expanduser()
    for path in places(place):
        try:
            if os.path.isfile(root / path):
                return str(root / path)
        except (OSError, ValueError):
            continue
    return None


def _stays_below(path: str) -> bool:
    return "\0" not in path and all(part not in ("", ".", "..") for part in path.split("/"))
