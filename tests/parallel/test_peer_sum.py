"""Sums over GPUs that write to one another's memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from beheld.platform.triton import HAS_TRITON
from tests import interpreted


@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
def test_the_kernel_in_the_interpreter() -> None:
    interpreted.run(Path(__file__).with_name("peer_sum_interpreted.py"))
