"""The host's memory, as its system and its control group tell it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")
# Versions 2 and 1 of control groups: the controller in a process's list of groups, the folder, and the files of limit,
# use and statistics with the entry of files that the system would give up.
_GROUP_FILES = (
    ("", "", ("memory.max", "memory.current", "memory.stat", "inactive_file")),
    (
        "memory",
        "memory",
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat", "total_inactive_file"),
    ),
)


def memory() -> tuple[int, int]:
    """Bytes that can be had, and all of them; the system gives up what it keeps of files."""
    page = os.sysconf("SC_PAGE_SIZE")
    free, total = unused_bytes(), os.sysconf("SC_PHYS_PAGES") * page
    available = entry("/proc/meminfo", "MemAvailable:")
    free = free if available is None else available << 10
    group = group_memory()
    return (free, total) if group is None or group[1] >= total else (min(free, group[0]), group[1])


def unused_bytes() -> int:
    """Bytes that nothing uses, not even the system for what it keeps of files."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    group = group_memory()
    return free if group is None else min(free, group[0])


def resident_bytes() -> int:
    """Bytes of this process that are in memory."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, IndexError, ValueError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def peak_resident_bytes() -> int:
    """The most bytes of this process that have been in memory since `reset_peak`, or since it began."""
    return (entry("/proc/self/status", "VmHWM:") or 0) << 10


def reset_peak() -> None:
    """Begin to measure `peak_resident_bytes` anew, where the system lets a process ask for it."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def group_memory(root: Path = _GROUPS, own: Path = _OWN_GROUPS) -> tuple[int, int] | None:
    """Bytes that this process's control group and those around it leave, and the lowest limit; None without a limit.

    In a container the root that is mounted is usually the container's own group. Elsewhere, for example in a service
    of systemd, `own` names the group below the root.
    """
    found = []
    for group, (limit_name, used_name, statistics, reclaimable) in _groups(root, own):
        try:
            limit = int((group / limit_name).read_text(encoding="ascii"))
            used = int((group / used_name).read_text(encoding="ascii"))
        except (OSError, ValueError):
            # No such version, or no limit: version 2 then says "max".
            continue
        used -= entry(group / statistics, reclaimable) or 0
        found.append((max(0, limit - used), limit))
    return (min(left for left, _ in found), min(limit for _, limit in found)) if found else None


def _groups(root: Path, own: Path) -> Iterator[tuple[Path, tuple[str, str, str, str]]]:
    """The folders of this process's groups and of those around them, with the names of their files."""
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        lines = []
    paths = {controllers: path.strip("/") for _, controllers, path in (line.split(":", 2) for line in lines)}
    for controller, folder, names in _GROUP_FILES:
        path = next((path for controllers, path in paths.items() if controller in controllers.split(",")), "")
        parts = path.split("/") if path and ".." not in path.split("/") else []
        for depth in range(len(parts), -1, -1):
            yield root.joinpath(folder, *parts[:depth]), names


def entry(path: str | Path, name: str) -> int | None:
    """The number after `name` at the start of a line of a file; None if there is none."""
    try:
        lines = Path(path).read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    return next((int(line.split()[1]) for line in lines if line.split(maxsplit=1)[:1] == [name]), None)


def cpu_flags() -> str:
    """What the processor can do, as the system lists it; empty if it lists nothing."""
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return ""


class ByteProducts(NamedTuple):
    """How this processor sums products of bytes.

    Attributes:
        lanes: the sums in one vector.
        vnni: one instruction adds four products to each sum; otherwise pairs are multiplied and added first (AVX2).
        bfloat16: one instruction rounds a vector to bfloat16.
    """

    lanes: int
    vnni: bool
    bfloat16: bool


def byte_products() -> ByteProducts | None:
    """Return how this processor sums products of bytes; None if it has none of the instructions that are known here."""
    flags = cpu_flags().split()
    if "avx512_vnni" in flags and "avx512vl" in flags:
        return ByteProducts(16, vnni=True, bfloat16="avx512_bf16" in flags)
    if not all(flag in flags for flag in ("avx2", "fma", "f16c")):
        return None
    return ByteProducts(8, vnni="avx_vnni" in flags, bfloat16=False)
