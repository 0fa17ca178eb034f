"""Local copies of addresses: a folder that is looked at before the network, for machines without one.

The folder is named by BEHELD_MEDIA_CACHE. The copy of `https://host/some/path%20x.jpg?y=1` is the file
`host/some/path%20x.jpg?y=1` below it; `wget -x` lays files like that, with the path decoded, which is found too. Only
the owner of the machine writes there; beheld reads.
"""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import unquote

from beheld.inputs.fetch.pinned_http import Place
from beheld.utils import env

_DEFAULT_PORTS = {"http": 80, "https": 443}


def places(place: Place) -> tuple[str, ...]:
    """The paths below the folder at which a copy of an address is looked for; none for an address that climbs."""
    host = place.host if place.port == _DEFAULT_PORTS.get(place.scheme) else f"{place.host}:{place.port}"
    plain = place.target.lstrip("/")
    return tuple(
        f"{host}/{path}" for path in dict.fromkeys((plain, unquote(plain))) if path and _stays_below(f"{host}/{path}")
    )


def find(place: Place) -> str | None:
    """The path of the copy of an address; None if there is none, or no folder of copies."""
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
