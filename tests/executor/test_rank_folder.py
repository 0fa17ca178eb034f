"""The folder of ranks is removed by its process, or by a later start once that process is gone."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from beheld.executor import rank_folder
from beheld.executor.rank_folder import RankFolder

SCRIPT = """
import os, signal, sys, tempfile
from beheld.executor.rank_folder import RankFolder

tempfile.tempdir = sys.argv[1]
print(RankFolder().path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def opened(folder: Path) -> list[str]:
    """Files below a folder that this process has open; those of other tests' engines are elsewhere."""
    paths = [os.path.realpath(fd) for fd in Path("/proc/self/fd").iterdir()]
    return [path for path in paths if path.startswith(str(folder))]


def test_folders_of_killed_processes_alone_are_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, timeout=60)
    left = Path(killed.stdout.strip())
    assert killed.returncode < 0
    assert left.parent == tmp_path
    (left / "stage-0").mkdir()
    (other := tmp_path / "beheld-ranks-unlocked").mkdir()
    first = RankFolder()
    assert left.exists(), "another process may be about to lock a young one"
    monkeypatch.setattr(rank_folder, "_YOUNG_S", -1.0)
    second = RankFolder()
    assert opened(tmp_path), "locks are files that are open"
    assert sorted(tmp_path.iterdir()) == sorted([other, first.path, second.path])
    assert first.path.stat().st_mode & 0o777 == 0o700
    for each in (first, second):
        each.remove()
        each.remove()
    assert list(tmp_path.iterdir()) == [other]
    assert opened(tmp_path) == []
