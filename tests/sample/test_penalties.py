"""Penalties by a kernel, as on a GPU, are those of one row after the other, as on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from beheld.utils.triton import HAS_TRITON
from tests import interpreted


@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
def test_kernel_in_the_interpreter() -> None:
    interpreted.run(Path(__file__).with_name("penalties_interpreted.py"))
