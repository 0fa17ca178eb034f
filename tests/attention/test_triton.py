"""The Triton kernels on a CPU, in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_kernels_in_the_interpreter() -> None:
    """In a process of its own: Triton must be told before it is first imported, and by then another test may have."""
    cases = Path(__file__).with_name("triton_interpreted.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(cases)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=cases.parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
