"""The JSON files of a checkpoint, which strangers wrote: bounded in size and depth wherever they are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from beheld.core.errors import ModelError

CONFIG = "config.json"
GENERATION = "generation_config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.json"
# The largest tokenizers that are published take 40 MiB, the largest indices of weights 20.
_MAX_BYTES = 256 << 20
_SMALL_BYTES = 4 << 20
_LARGE = (TOKENIZER, "vocab.json", "tekken.json", ".index.json")
_MAX_DEPTH = 64


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`, or an empty one if there is no such file.

    Raises:
        ModelError: the file is not a JSON object, is too large, or is nested too deeply.
    """
    value = _read(path, {})
    if not isinstance(value, dict):
        raise ModelError(f"{path.name} is not a JSON object.", "Fetch the checkpoint again.")
    return value


def read_json_list(path: Path) -> list[dict[str, Any]]:
    """The JSON list of objects in `path`, or an empty one if there is no such file.

    Raises:
        ModelError: the file is no such list, is too large, or is nested too deeply.
    """
    value = _read(path, [])
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise ModelError(f"{path.name} is not a JSON list of objects.", "Fetch the checkpoint again.")
    return value


def _read(path: Path, missing: Any) -> Any:
    if not path.is_file():
        return missing
    most = _MAX_BYTES if path.name.endswith(_LARGE) else _SMALL_BYTES
    try:
        if path.stat().st_size > most:
            raise ModelError(f"{path.name} is larger than {most >> 20} MiB.", "Fetch the checkpoint again.")
        value = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise _too_deep(path) from error
    except (ValueError, OSError) as error:
        raise ModelError(f"{path.name} cannot be read: {error}.", "Fetch the checkpoint again.") from error
    _check_depth(value, path)
    return value


def _check_depth(value: Any, path: Path) -> None:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(_MAX_DEPTH):
        entries = (entry for each in level for entry in (each.values() if isinstance(each, dict) else each))
        level = [entry for entry in entries if isinstance(entry, dict | list)]
        if not level:
            return
    raise _too_deep(path)


def _too_deep(path: Path) -> ModelError:
    return ModelError(f"{path.name} is nested more than {_MAX_DEPTH} deep.", "Fetch the checkpoint again.")
