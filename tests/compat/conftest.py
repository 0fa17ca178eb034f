"""`import vllm` means beheld while a test of this folder runs, and nothing afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from beheld.compat import finder


@pytest.fixture(autouse=True)
def aliases() -> Iterator[None]:
    """The import hook, taken away again."""
    finder.install()
    yield
    finder.uninstall()
