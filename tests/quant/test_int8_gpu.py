"""int8 weights on a GPU, computed on a CPU in the same numbers: kernels, layers, models, checkpoints, refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from beheld.platform.triton import HAS_TRITON
from tests import interpreted

CASES = Path(__file__).with_name("int8_interpreted.py")


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_kernels() -> None:
    interpreted.run(CASES)
