"""Layers with gates for a single row by kernels, as on a GPU, are transformers' layers."""

from __future__ import annotations

from pathlib import Path

import pytest

from beheld.platform.triton import HAS_TRITON
from tests import interpreted


@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
def test_kernels_in_the_interpreter() -> None:
    interpreted.run(Path(__file__).with_name("gated_row_interpreted.py"))
