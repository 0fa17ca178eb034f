"""A plugin of pytest for vLLM's server tests: `vllm` is beheld, and each test's result goes into a file."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
import sys
import types
from collections.abc import Sequence
from typing import Any

import pytest

from beheld.compat import finder

_RESULTS: dict[str, tuple[str, str]] = {}


class _Nowhere(type):
    """The type of names that beheld has not; their attributes are such names too."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _absent(f"{cls.__name__}.{name}")

    def __add__(cls, other: Any) -> Any:
        return cls()

    def __call__(cls, *_: Any, **__: Any) -> Any:
        pytest.skip(f"inside vLLM: {cls.__name__}", allow_module_level=True)


def _absent(name: str) -> Any:
    return _Nowhere(name, (Exception,), {})


class _Stub(types.ModuleType):
    """A module of vLLM that beheld has not."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "get_tokenizer":
            return lambda tokenizer_name, **_: _tokenizer(tokenizer_name)
        return _absent(f"{self.__name__}.{name}")


def _tokenizer(name: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name)


class _Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of vLLM that beheld has not."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        """A spec for each module under `vllm`."""
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] == "vllm" else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """An empty one; of a module that beheld has, its names."""
        from importlib import import_module

        from beheld.compat.names import MODULES

        made = _Stub(spec.name)
        for name, place in MODULES.get(spec.name, {}).items():
            module, _, attribute = place.partition(":")
            setattr(made, name, getattr(import_module(module), attribute))
        return made

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing is run."""


sys.meta_path.insert(0, _Stubs())
assert finder


def pytest_runtest_logreport(report: Any) -> None:
    """Keep what came of each phase of a test; the worst counts."""
    name = report.nodeid.split("::", 1)[-1]
    line = str(getattr(report, "longreprtext", "")).strip()
    short = next((each for each in reversed(line.splitlines()) if each.startswith("E  ")), line[-300:])[:300]
    if report.skipped:
        _RESULTS[name] = "inside", short
    elif report.failed:
        absent = "ABSENT:" in line or "LocalEntryNotFoundError" in line
        _RESULTS[name] = ("absent" if absent else "failed"), short
    elif report.when == "call":
        _RESULTS[name] = "passed", ""


def pytest_collectreport(report: Any) -> None:
    """A file that cannot be imported counts once."""
    if report.failed or (report.skipped and report.nodeid.endswith(".py")):
        line = str(report.longreprtext).strip().splitlines()[-1][:300]
        _RESULTS["(the file)"] = ("inside" if report.skipped else "failed"), line


def pytest_sessionfinish() -> None:
    """Write the file."""
    with open(os.environ["PEER_RECORD"], "w", encoding="utf-8") as file:
        json.dump(_RESULTS, file)
