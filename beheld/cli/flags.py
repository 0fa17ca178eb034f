"""Flags generated from ServerOptions, and what command lines and YAML files set."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from beheld.cli import vllm_flags
from beheld.core.config import EngineArgs
from beheld.core.errors import ConfigError
from beheld.core.value_checks import nearest
from beheld.flags.engine import SKIPPED, Several, plain, spellings
from beheld.flags.json_values import json_value
from beheld.platform.room import check_room


def engine_options(arguments: argparse.Namespace, *, answers: bool = False) -> dict[str, Any]:
    """Return the engine options that were given, by field name.

    Args:
        answers: as vLLM's command of the same purpose does, with the logits processors of installed packages.

    Raises:
        ConfigError: the engines' processes are no whole number, or have no room on this machine; or an installed
            package's processor cannot be loaded.
    """
    names = {field.name for field in dataclasses.fields(EngineArgs)} - SKIPPED
    found = {name: value for name, value in vars(arguments).items() if name in names and value is not None}
    if found.get("logits_processors"):
        from beheld.compat.finder import install

        # Classes that were written for vLLM import its modules, and those of vLLM's own are named by them.
        install()
    if answers:
        from beheld.compat.installed import with_installed

        processors = with_installed(found.get("logits_processors"))
        found |= {} if processors is None else {"logits_processors": processors}
    # Before libraries load, which takes seconds. `beheld batch --ray` has engines on other hosts.
    elsewhere = {"data_parallel_backend": "ray"} if getattr(arguments, "ray", False) else {}
    check_room(EngineArgs(**found | elsewhere))
    return found


def add_server_flags(group: argparse._ArgumentGroup, *, names: Collection[str] | None = None) -> list[argparse.Action]:
    """Add one flag per operator-settable field of ServerOptions; values are stored under the field names.

    `names` are the fields that apply to the command; None for all.
    """
    made = []
    for field in _server_fields():
        if names is not None and field.name not in names:
            continue
        metadata = field.metadata
        how: dict[str, Any]
        if isinstance(field.default, bool):
            how = {"action": "store_false" if field.default else "store_true"}
        elif metadata.get("many"):
            how = {"nargs": "+", "metavar": metadata["metavar"]}
        elif metadata.get("json"):
            how = {"type": json_value, "metavar": "JSON"}
        else:
            words = partial(vllm_flags.same, metadata["flag"])
            kind = type(field.default) if isinstance(field.default, int | float) else words
            # Where a plug-in may have others, ServerOptions checks the value.
            choices = None if "plugin" in metadata else metadata.get("choices")
            how = {"type": kind, "choices": choices} | ({} if choices else {"metavar": "VALUE"})
        how["help"] = plain(metadata["meaning"])
        made.append(group.add_argument(*spellings(metadata["flag"]), default=None, dest=field.name, **how))
    return made


def server_values(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the server options that were given, by field name and in the fields' units."""
    found = {}
    for field in _server_fields():
        value = getattr(arguments, field.name, None)
        if value is not None:
            found[field.name] = value * field.metadata["unit"] if "unit" in field.metadata else value
    return found


def _server_fields() -> list[dataclasses.Field[Any]]:
    from beheld.server.options import ServerOptions

    return [field for field in dataclasses.fields(ServerOptions) if "flag" in field.metadata]


def _read(path: Path) -> Any:
    """Read a YAML file.

    Raises:
        ConfigError: the file cannot be read, or sets an option twice (YAML's own reader would keep the last).
    """
    import yaml

    class Once(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            names = [self.construct_object(key, deep=True) for key, _ in node.value]
            for place, name in enumerate(names):
                if name in names[:place]:
                    raise ConfigError(
                        f"The option {name!r} is set twice in {str(path)!r}.", "Set it once.", param=str(name)
                    )
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(path.read_text(encoding="utf-8"), Once) or {}
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(
            f"The file {str(path)!r} cannot be opened: {error.strerror}.",
            "Name a YAML file of options.",
            param="config",
        ) from error
    except (ValueError, yaml.YAMLError) as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f" (line {mark.line + 1}, column {mark.column + 1})"
        raise ConfigError(
            f"The file {str(path)!r} cannot be read as YAML{where}.", "Write a line OPTION: VALUE each.", param="config"
        ) from error


def apply_file(arguments: argparse.Namespace, path: Path, actions: Sequence[argparse.Action]) -> None:
    """Fill in from a YAML file the options that the command line does not set, parsed as their flags are.

    Raises:
        ConfigError: the file cannot be read, names an unknown option, or holds an invalid value.
    """
    values = _read(path)
    if not isinstance(values, dict):
        raise ConfigError(
            f"The file {str(path)!r} is not a mapping of options.", "Write a line OPTION: VALUE each.", param="config"
        )
    known = {action.option_strings[0].removeprefix("--").replace("-", "_"): action for action in actions}
    taken: set[str] = set()
    for name, value in values.items():
        key = str(name).replace("-", "_")
        if key not in known and vllm_flags.answer(key.replace("_", "-"), str(value)) is not None:
            continue
        if key not in known:
            raise ConfigError(f"Unknown option {name!r} in {str(path)!r}.", nearest(key, known), param=key)
        if key in taken:
            raise ConfigError(f"The option {name!r} is set twice in {str(path)!r}.", "Set it once.", param=key)
        taken.add(key)
        found = _from_file(known[key], key, value)
        if getattr(arguments, known[key].dest) is None:
            setattr(arguments, known[key].dest, found)


def _from_file(action: argparse.Action, name: str, value: Any) -> Any:
    """Parse a value from the file as its flag would."""
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise _not_taken(name, value, "Write true or false.")
        switched_off = isinstance(action, argparse._StoreFalseAction)
        return value is not switched_off
    if action.nargs == "?" and isinstance(value, bool):
        return value
    if action.nargs == "+":
        entries = value if isinstance(value, list) else [value]
        if not entries:
            raise _not_taken(name, value, "Write at least one, or leave the option out.")
        words = [_word(name, entry) for entry in entries]
        return [part for word in words for part in word.split(",") if part] if isinstance(action, Several) else words
    word = json.dumps(value) if action.type is json_value and isinstance(value, dict | list) else _word(name, value)
    try:
        made = action.type(word) if callable(action.type) else word
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise _not_taken(name, value, f"It is read as by --{name.replace('_', '-')}.") from error
    if action.choices is not None and made not in action.choices:
        raise _not_taken(name, value, f"Known: {', '.join(map(str, action.choices))}.")
    return made


def _word(name: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise _not_taken(name, value, "Write one text or number.")
    return str(value)


def _not_taken(name: str, value: Any, remedy: str) -> ConfigError:
    shown = "This value" if "key" in name or "token" in name else repr(value)[:128]
    return ConfigError(f"{shown} is not a value of {name.replace('_', '-')!r}.", remedy, param=name)
