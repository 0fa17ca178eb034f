"""A command that starts without standard streams."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_SCRIPT = """
import os, socket, subprocess, sys
from beheld.utils import standard_streams
standard_streams.ensure()
standard_streams.ensure()
ours, theirs = socket.socketpair()
print("what a library prints", flush=True)
print("and its warnings", file=sys.stderr, flush=True)
child = subprocess.run([sys.executable, "-c", "print(1)"], stdout=None)
ours.setblocking(False)
try:
    heard = ours.recv(100)
except BlockingIOError:
    heard = b""
os.write(int(sys.argv[1]), repr((min(ours.fileno(), theirs.fileno()) > 2, heard, child.returncode)).encode())
"""


@pytest.mark.case(121)
@pytest.mark.parametrize("closed", [(0, 1, 2), (1,)])
def test_what_is_printed_reaches_no_connection(closed: tuple[int, ...]) -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as told:
        kept = os.dup(writer)
        os.close(writer)
        os.set_inheritable(kept, True)
        shell = " ".join(f"{number}>&-" for number in closed)
        command = f'exec "$0" -c "$1" {kept} {shell}'
        process = subprocess.Popen(
            ["sh", "-c", command, sys.executable, _SCRIPT], close_fds=False, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(kept)
        assert told.read() == b"(True, b'', 0)"
        assert process.wait(60) == 0
