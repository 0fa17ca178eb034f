"""Starts nodes of Ray. Ray gives a node 30 s to report, which a busy machine may exceed: then it is started again."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from typing import Any

_LATE = "timed out"
_TRIES = 5


def start_node(command: Sequence[str], end: Callable[[], None]) -> None:
    """Run a `ray start`, which returns once the node has reported. The test's own limit ends one that hangs.

    Args:
        end: ends what a node that was late has left.
    """
    for left in reversed(range(_TRIES)):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        said = done.stdout + done.stderr
        if done.returncode == 0:
            return
        assert left, said
        assert _LATE in said.lower(), said
        end()


def start_cluster(*nodes: dict[str, Any]) -> Any:
    """Return a cluster of nodes on this machine, the first of which is the head."""
    import psutil
    from ray.cluster_utils import Cluster

    before = set(psutil.Process().children(recursive=True))
    for left in reversed(range(_TRIES)):
        made = Cluster()
        try:
            for options in nodes:
                made.add_node(**options)
        except Exception as error:
            made.shutdown()
            for process in set(psutil.Process().children(recursive=True)) - before:
                process.kill()
            if not left or _LATE not in str(error).lower():
                raise
        else:
            return made
    raise AssertionError
