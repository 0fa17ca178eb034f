"""Importing `beheld.compat.vllm` makes `import vllm` and its submodules give beheld's classes."""

from __future__ import annotations

import importlib
from typing import Any

from beheld.compat.finder import install

install()


def __getattr__(name: str) -> Any:
    """The names of `vllm`, for `import beheld.compat.vllm as vllm`."""
    return getattr(importlib.import_module("vllm"), name)
