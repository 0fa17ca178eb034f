"""Runs tests of Triton's kernels in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

_begun: dict[Path, tuple[subprocess.Popen[str], IO[str]]] = {}


def begin(cases: Path) -> None:
    """In a process of its own: Triton must be told before it is first imported, and by then another test may have."""
    if cases in _begun:
        return
    told = tempfile.TemporaryFile("w+")  # noqa: SIM115 (read when the process has ended)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(cases)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    process = subprocess.Popen(
        command, env=environment, cwd=cases.parents[2], stdout=told, stderr=subprocess.STDOUT, text=True
    )
    _begun[cases] = process, told


def run(cases: Path) -> None:
    """Wait for the end of a file's tests, which all must have passed."""
    begin(cases)
    process, told = _begun.pop(cases)
    try:
        status = process.wait()
    except BaseException:
        process.kill()
        raise
    told.seek(0)
    assert status == 0, told.read()[-5000:]
