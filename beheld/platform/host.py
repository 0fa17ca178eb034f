"""The host's memory, as its system and its control group tell it."""

from __future__ import annotations

import ctypes
import functools
import os
import re
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
    parted = [line.split(":", 2) for line in lines if line.count(":") > 1]
    paths = {controllers: path.strip("/") for _, controllers, path in parted}
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


# Bytes that are read of a mapped file before its pages are given back.
_READ_AT_A_TIME = 64 << 20
# Fewer bytes than these are not worth the milliseconds that the list of mappings takes.
_WORTH_A_LOOK = 16 << 20
_DONTNEED = 4
# Entries of /proc/self/pagemap that are read at a time. Of an entry, bit 63 says that the page is in memory, bit 62
# that it is swapped out, and bit 61 that it is a file's or shared: a file's page that was written privately is not.
_PAGES_AT_A_TIME = 1 << 16


class FilePages:
    """Gives back the memory of mapped files while weights are copied from them; a few MiB stay.

    The system keeps the files' pages in its own cache, so that they are there when they are read again, but they are no
    longer counted as memory of this process.
    """

    def __init__(self) -> None:
        # By mapping: how many bytes were read since the last time, and the lowest and highest address of them.
        self._read: dict[tuple[int, int], tuple[int, int, int]] = {}
        self._maps: list[tuple[int, int]] | None = None
        # What was read before the mappings were looked at: addresses and bytes, and all bytes together.
        self._first: list[tuple[int, int]] = []
        self._first_bytes = 0

    def read(self, address: int, num_bytes: int) -> None:
        """Note that bytes were read; if they are of a mapped file, give them back now and then."""
        if self._maps is not None:
            self._note(self._maps, address, num_bytes)
            return
        self._first.append((address, num_bytes))
        self._first_bytes += num_bytes
        if self._first_bytes >= _WORTH_A_LOOK:
            self._maps = _file_maps()
            for each in self._first:
                self._note(self._maps, *each)
            self._first.clear()

    def _note(self, maps: list[tuple[int, int]], address: int, num_bytes: int) -> None:
        found = next(((start, stop) for start, stop in maps if start <= address < stop), None)
        if found is None:
            return
        before, low, high = self._read.get(found, (0, found[1], found[0]))
        self._read[found] = before + num_bytes, min(low, address), max(high, address + num_bytes)
        if before + num_bytes >= _READ_AT_A_TIME:
            _give_back(found, *self._read.pop(found)[1:])

    def end(self) -> None:
        """Give back what was read since the last time."""
        for found, (_, low, high) in self._read.items():
            _give_back(found, low, high)
        self._read.clear()


# Where the system tells of one mapping alone; the list of all takes milliseconds.
_MAPPING = "/proc/self/map_files/{:x}-{:x}"
# A line of /proc/self/maps: start, stop, mode, offset, device and inode. Of thousands, most are no files.
_MAPPED_FILE = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) ..-. \S+ \S+ [1-9]", re.MULTILINE)


# A library's code or constants: of its mappings, those that cannot be written, and are worth a look.
_LIBRARY = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) r-[x-]p \S+ \S+ [1-9]\d* +/.*\.so[.\d]*$", re.MULTILINE)
_LIBRARY_BYTES = 1 << 20


def give_back_libraries() -> None:
    """Give back the code and constants of loaded libraries, which the system's cache of files keeps.

    What is used comes back when it is used. Loading a library reads much that nothing uses later: all addresses that
    must be changed, and with PyTorch's build for CUDA whole libraries of which a CPU needs nothing.
    """
    for start, stop in _file_maps(_LIBRARY):
        # Addresses that the loader brought in are written.
        if stop - start >= _LIBRARY_BYTES:
            _give_back((start, stop), start, stop, _LIBRARY)


def _file_maps(pattern: re.Pattern[bytes] = _MAPPED_FILE) -> list[tuple[int, int]]:
    """Addresses of mapped files: start and stop; without a pattern, of those that are not run."""
    with suppress(OSError):
        listed = Path("/proc/self/maps").read_bytes()
        return [(int(start, 16), int(stop, 16)) for start, stop in pattern.findall(listed)]
    return []


def _give_back(mapping: tuple[int, int], low: int, high: int, pattern: re.Pattern[bytes] = _MAPPED_FILE) -> None:
    """Give back pages of a mapped file, all between two addresses, unless one was written: that would be lost."""
    size = os.sysconf("SC_PAGE_SIZE")
    start, stop = low // size * size, min(-(-high // size) * size, mapping[1])
    if _written(start, stop):
        return
    # Last of all, for another thread may load a library or map memory there: what changed has other addresses.
    if os.path.lexists(_MAPPING.format(*mapping)) or mapping in _file_maps(pattern):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _DONTNEED)


def _written(start: int, stop: int) -> bool:
    """Return whether a page between two addresses was written, or may have been.

    The table of pages says it in milliseconds; /proc/self/smaps takes ten times as long, for it counts all memory of
    the process.
    """
    import numpy as np

    size = os.sysconf("SC_PAGE_SIZE")
    first, stop_page = start // size, -(-stop // size)
    try:
        with Path("/proc/self/pagemap").open("rb", buffering=0) as table:
            while first < stop_page:
                count = min(stop_page - first, _PAGES_AT_A_TIME)
                pages = np.frombuffer(os.pread(table.fileno(), 8 * count, 8 * first), np.uint64)
                if not len(pages):
                    return True
                in_memory, of_file, swapped = (pages & np.uint64(1 << bit) != 0 for bit in (63, 61, 62))
                if ((swapped | in_memory) & ~of_file).any():
                    return True
                first += len(pages)
    except OSError:
        return True
    return False


@functools.cache
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
    return _byte_products(cpu_flags())


@functools.cache
def _byte_products(listed: str) -> ByteProducts | None:
    flags = listed.split()
    if "avx512_vnni" in flags and "avx512vl" in flags:
        return ByteProducts(16, vnni=True, bfloat16="avx512_bf16" in flags)
    if not all(flag in flags for flag in ("avx2", "fma", "f16c")):
        return None
    return ByteProducts(8, vnni="avx_vnni" in flags, bfloat16=False)
