"""Runs a command in a memory cgroup of its own, as a container would; at its end prints what the kernel counted.

    python -m benchmarks.memory_limit 2048 COMMAND ...

Takes root and a memory controller (version 1 or 2) that may be written. The last line, on standard error, is JSON:
`peak_mib`, and `killed`, the processes that the kernel killed for lack of memory. SIGTERM and SIGINT go to the command.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_MIB = 1 << 20


def main() -> int:
    """Make the group, run the command in it, report, remove the group."""
    limit, command = int(sys.argv[1]) * _MIB, sys.argv[2:]
    first = (_ROOT / "memory").is_dir()
    group = (_ROOT / "memory" if first else _ROOT) / f"beheld-{os.getpid()}"
    group.mkdir()
    names = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes") if first else ("memory.max", "memory.swap.max")
    (group / names[0]).write_text(str(limit))
    # No swap, where it is counted.
    with contextlib.suppress(OSError):
        (group / names[1]).write_text(str(limit if first else 0))

    def enter() -> None:
        (group / "cgroup.procs").write_text(str(os.getpid()))

    process = subprocess.Popen(command, preexec_fn=enter)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: process.send_signal(number))
    code = process.wait()
    peak = group / ("memory.max_usage_in_bytes" if first else "memory.peak")
    events = group / ("memory.oom_control" if first else "memory.events")
    counts = dict(line.split() for line in events.read_text().splitlines())
    found = {"peak_mib": round(int(peak.read_text()) / _MIB), "killed": int(counts["oom_kill"])}
    print(json.dumps(found), file=sys.stderr, flush=True)
    _remove(group)
    return code


def _remove(group: Path) -> None:
    """End what is left in it, and remove it."""
    for _ in range(100):
        for word in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                os.kill(int(word), signal.SIGKILL)
        with contextlib.suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main())
