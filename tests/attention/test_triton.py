"""The Triton kernels on a CPU, in Triton's interpreter."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests import interpreted


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("cases", ["triton_interpreted.py", "cross_interpreted.py"])
def test_kernels_in_the_interpreter(cases: str) -> None:
    interpreted.run(Path(__file__).with_name(cases))
