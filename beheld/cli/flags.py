"""Flags made from EngineArgs, with vLLM's spelling: --max-model-len, --limit-mm-per-prompt '{"image": 2}', ..."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from beheld.core.config import EngineArgs

# Fields that are not a flag of their own: given as arguments, or Python objects.
_SKIPPED = frozenset({"model", "logits_processors"})


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """One flag per field of EngineArgs; dashes and underscores are both understood."""
    group = parser.add_argument_group("engine options")
    for field in dataclasses.fields(EngineArgs):
        if field.name in _SKIPPED:
            continue
        flag = "--" + field.name.replace("_", "-")
        spellings = [flag] if flag == "--" + field.name else [flag, "--" + field.name]
        kind = str(field.type)
        if kind.startswith("bool"):
            group.add_argument(*spellings, action=argparse.BooleanOptionalAction, default=None, dest=field.name)
        else:
            reader = _reader(kind)
            group.add_argument(*spellings, default=None, dest=field.name, type=reader, metavar="VALUE")


def engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The engine options that were given, by field name."""
    names = {field.name for field in dataclasses.fields(EngineArgs)} - _SKIPPED
    return {name: value for name, value in vars(arguments).items() if name in names and value is not None}


def _reader(kind: str) -> Any:
    if "dict" in kind:
        return _json
    if "list" in kind:
        return lambda text: [part for part in text.split(",") if part]
    if kind.startswith("int"):
        return int
    if kind.startswith("float"):
        return float
    return str


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be JSON, for example '{{\"image\": 2}}', got {text!r}") from error
