"""One process that starts checkpoints which may be broken, for all tests of this folder: libraries are loaded once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import tiny
from tests.checkpoint.trials import Trials


@pytest.fixture(scope="session")
def trials() -> Iterator[Trials]:
    """Forks a process for each trial, so that none changes another."""
    with Trials(tiny.checkpoint("llama"), tiny.checkpoint("qwen2_vl")) as found:
        yield found
