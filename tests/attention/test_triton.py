"""The Triton kernels on a CPU, in Triton's interpreter."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests import interpreted

FILES = [
    Path(__file__).with_name(name)
    for name in ("triton_interpreted.py", "cross_interpreted.py", "latent_interpreted.py", "delta_interpreted.py")
]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("cases", FILES, ids=lambda path: path.stem)
def test_kernels_in_the_interpreter(cases: Path, request: pytest.FixtureRequest) -> None:
    # Each computes on one core for half a minute: all of them that are wanted, at once.
    for item in request.session.items:
        if item.path == request.path and isinstance(item, pytest.Function):
            interpreted.begin(item.callspec.params["cases"])
    interpreted.run(cases)
