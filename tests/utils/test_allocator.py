"""What is asked of the C library's allocator is what it does."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Threads that are all alive, each of which has taken memory; then the library says what arenas there are.
_ARENAS = """
import ctypes, sys, threading
from beheld.utils.allocator import share_arenas

if sys.argv[1] == "few" and not share_arenas():
    print("none")
    raise SystemExit
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
all_there = threading.Barrier(12)

def take():
    libc.malloc(5000)
    all_there.wait()

threads = [threading.Thread(target=take) for _ in range(12)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
libc.malloc_stats()
"""


def _arenas(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", _ARENAS, how], capture_output=True, text=True, check=True)
    if "none" in done.stdout:
        pytest.skip("another C library")
    return done.stderr.count("Arena ")


def test_threads_share_two_arenas_where_they_are_asked_to() -> None:
    assert _arenas("few") == 2
    # As it would be otherwise; on one core the library's own limit is eight.
    assert _arenas("many") > 2
