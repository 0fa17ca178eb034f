"""A clock for one module under test.

The process's own must not change: the loops of servers go by it, and one that asks while it stands in the past waits
for hours.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import pytest


def set_clock(patch: pytest.MonkeyPatch, monotonic: Callable[[], float], *modules: ModuleType) -> None:
    """Until the test ends, `time.monotonic` of these modules alone is another."""
    for module in modules:
        patch.setattr(module, "time", SimpleNamespace(**{**vars(time), "monotonic": monotonic}))
