"""Flags generated from EngineArgs, in vLLM's spelling (--max-model-len)."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Collection
from fractions import Fraction
from typing import Any

from beheld.core.config import EngineArgs
from beheld.flags.help import FLAG_HELP
from beheld.flags.json_values import json_value

# Fields without a flag: positional arguments.
SKIPPED = frozenset({"model"})
# Short spellings that scripts use.
_SHORT = {
    "tensor_parallel_size": ("-tp",),
    "pipeline_parallel_size": ("-pp",),
    "data_parallel_size": ("-dp",),
    "enable_expert_parallel": ("-ep",),
    "quantization": ("-q",),
}


def add_engine_flags(
    parser: argparse.ArgumentParser, list_nargs: str | None = None, *, names: Collection[str] | None = None
) -> list[argparse.Action]:
    """Add one flag per field of EngineArgs; dashes and underscores are both accepted.

    Args:
        parser: the command's parser.
        list_nargs: argparse's nargs for list options. With None, values are separated by commas; a command whose
            positional words may follow its options needs that.
        names: the fields that apply to the command; None for all.
    """
    group = parser.add_argument_group("engine options")
    made = []
    for field in dataclasses.fields(EngineArgs):
        if field.name in SKIPPED or (names is not None and field.name not in names):
            continue
        kind = str(field.type)
        how: dict[str, Any]
        if kind.startswith("bool | str"):
            how = {"nargs": "?", "const": True, "type": _key, "metavar": "VALUE"}
        elif kind.startswith("bool"):
            how = {"action": argparse.BooleanOptionalAction}
        elif "list" in kind:
            how = {"nargs": list_nargs, "action": Several, "metavar": "VALUE"}
        else:
            how = {"type": _reader(kind), "metavar": "VALUE"}
        how["help"] = plain(FLAG_HELP.get(field.name, ("", ""))[1])
        words = (*spellings(field.name), *_SHORT.get(field.name, ()))
        made.append(group.add_argument(*words, default=None, dest=field.name, **how))
    return made


def plain(meaning: str) -> str:
    """Strip Markdown for --help."""
    return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", meaning).replace("`", "").replace("%", "%%")


def spellings(name: str) -> list[str]:
    """The flag of a field, with dashes and with underscores."""
    return list(dict.fromkeys(("--" + name.replace("_", "-"), "--" + name.replace("-", "_"))))


class Several(argparse.Action):
    """Collects values given as separate words or separated by commas."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        given = [values] if isinstance(values, str) else values
        setattr(namespace, self.dest, [part for text in given for part in text.split(",") if part])


def _reader(kind: str) -> Any:
    if "dict" in kind:
        return json_value
    if kind.startswith("int"):
        return _whole
    if kind.startswith("float"):
        return float
    return str


def _whole(text: str) -> int:
    """Parse a whole number with an optional unit suffix: 32k is 32,000, 32K is 32,768."""
    found = re.fullmatch(r"\s*([+-]?\d+)(?:(\.\d+)?([kmgtKMGT]))?\s*", text, re.ASCII)
    if found is None:
        raise argparse.ArgumentTypeError(f"must be a whole number, as 4096, 4k (4000) or 4K (4096), got {text!r}")
    digits, part, letter = found.groups()
    if letter is None:
        return int(digits)
    base, power = (1000 if letter.islower() else 1024), "kmgt".index(letter.lower()) + 1
    many = Fraction(digits + (part or "")) * base**power
    if many.denominator != 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number")
    return int(many)


def _key(text: str) -> bool | str:
    """Parse a key; "true" means the stored one."""
    if not text.strip():
        raise argparse.ArgumentTypeError("is empty")
    return True if text == "true" else text
