"""An exit hook runs at the end of its own process, and of no other."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import atexit, os
from beheld.utils.exit_hook import ExitHook

atexit.register(lambda: print("earlier", flush=True))
hook = ExitHook(lambda: print("ended", flush=True))
ExitHook(lambda: print("cancelled", flush=True)).cancel()
child = os.fork()
if not child:
    raise SystemExit
os.waitpid(child, 0)
"""


def test_the_last_registered_is_called_first_and_only_here() -> None:
    found = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=60)
    # The forked process has what was registered before.
    assert found.stdout.split() == ["earlier", "ended", "earlier"]
