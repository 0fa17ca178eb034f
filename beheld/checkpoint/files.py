"""The JSON files of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from beheld.core.errors import ModelError

CONFIG = "config.json"


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`, or an empty one if there is no such file.

    Raises:
        ModelError: the file is not a JSON object.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ModelError(f"{path.name} cannot be read: {error}.", "Fetch the checkpoint again.") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path.name} is not a JSON object.", "Fetch the checkpoint again.")
    return value
