"""Parsers of calls and of reasoning from an operator's own file, which was written for vLLM."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from beheld.core.errors import ConfigError


def with_plugins(said: dict[str, Any]) -> dict[str, Any]:
    """The server's options with the classes that its plug-ins register under the names of its parsers.

    Raises:
        ConfigError: a plug-in cannot be loaded, or no parser is named or registered.
    """
    made = dict(said)
    for kind in ("tool", "reasoning"):
        path = made.get(f"{kind}_parser_plugin")
        if path is not None:
            flag = "tool-call-parser" if kind == "tool" else "reasoning-parser"
            made[f"{kind}_plugin"] = _loaded(path, kind, flag, made.get(f"{kind}_parser"))
    return made


def _loaded(path: str, kind: str, flag: str, name: str | None) -> type:
    from beheld.compat.finder import install
    from beheld.compat.parsers import REASONING_PARSERS, TOOL_PARSERS

    param = f"{kind}_parser_plugin"
    if name is None:
        raise ConfigError(f"--{kind}-parser-plugin needs the parser's name.", f"Add --{flag} NAME.", param=param)
    # The file imports vllm, which means beheld's classes.
    install()
    try:
        _imported(path)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"The plug-in {path!r} cannot be loaded: {type(error).__name__}: {error}",
            "Name a Python file or a module that registers a parser, as for vLLM.",
            param=param,
        ) from error
    return (TOOL_PARSERS if kind == "tool" else REASONING_PARSERS).found(name)


def _imported(path: str) -> ModuleType:
    """A module by its name, or a file by its path."""
    file = Path(path).expanduser()
    if file.suffix != ".py":
        return importlib.import_module(path)
    # A name of its own: `json.py` and `tokenizers.py` are no modules that others import.
    name = f"beheld_plugin_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise ConfigError(f"There is no file {path!r}.", "Name a Python file.", param="plugin")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
