"""The choice of a single row's experts by kernels, as on a GPU, is that of transformers' routers."""

from __future__ import annotations

from pathlib import Path

import pytest

from beheld.platform.triton import HAS_TRITON
from tests import interpreted


@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
def test_kernels_in_the_interpreter() -> None:
    interpreted.run(Path(__file__).with_name("route_row_interpreted.py"))
