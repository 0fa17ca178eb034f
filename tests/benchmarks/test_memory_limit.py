"""A command in a memory cgroup: it ends where it takes more than the limit, and the group goes with it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path("/sys/fs/cgroup")


def groups() -> set[Path]:
    return {path for folder in (_ROOT, _ROOT / "memory") for path in folder.glob("beheld-*")}


@pytest.fixture
def writable() -> None:
    """Only where this process may make a memory cgroup."""
    folder = _ROOT / "memory" if (_ROOT / "memory").is_dir() else _ROOT
    probe = folder / "beheld-probe"
    try:
        probe.mkdir()
        found = any((probe / name).exists() for name in ("memory.max", "memory.limit_in_bytes"))
        probe.rmdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    if not found:
        pytest.skip("no memory controller can be written here")


@pytest.mark.usefixtures("writable")
@pytest.mark.parametrize(("mib", "killed"), [(8, 0), (200, 1)])
def test_what_takes_more_is_killed_and_counted(mib: int, killed: int) -> None:
    before = groups()
    code = f"taken = bytearray({mib} << 20); taken[::4096] = bytes(len(taken[::4096]))"
    command = [sys.executable, "-m", "benchmarks.memory_limit", "64", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    told = json.loads(done.stderr.splitlines()[-1])
    assert told["killed"] == killed
    assert (done.returncode != 0) == bool(killed)
    assert mib <= told["peak_mib"] <= 64 or killed
    assert groups() <= before
