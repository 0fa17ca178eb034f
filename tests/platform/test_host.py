"""The host's memory."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import pytest

from beheld.platform import host

_SIZE = 256 << 10


def _mapped(folder: Path) -> tuple[mmap.mmap, int]:
    """A file mapped privately, all of its pages read, and its address."""
    path = folder / "weights"
    path.write_bytes(b"\x07" * _SIZE)
    with path.open("r+b") as file:
        pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    assert pages[:] == b"\x07" * _SIZE
    return pages, ctypes.addressof(ctypes.c_char.from_buffer(pages))


def _resident_kib(address: int) -> int:
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        inside = line.startswith(f"{address:x}-") or (inside and line.split()[0].endswith(":"))
        if inside and line.startswith("Rss:"):
            return int(line.split()[1])
    return 0


pytestmark = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux")


@pytest.fixture(autouse=True)
def few_bytes_are_worth_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of tests are small."""
    monkeypatch.setattr(host, "_WORTH_A_LOOK", 1)


def test_for_few_bytes_nobody_looks_at_the_mappings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages, address = _mapped(tmp_path)
    monkeypatch.setattr(host, "_WORTH_A_LOOK", _SIZE)
    own = host.FilePages()
    own.read(address, _SIZE - 1)
    with monkeypatch.context() as looks:
        looks.setattr(host, "_file_maps", lambda: pytest.fail("looked"))
        own.end()
        own.read(address, 0)
    assert _resident_kib(address) >= _SIZE >> 10
    # What was read before counts.
    own.read(address + _SIZE - 1, 1)
    own.end()
    assert _resident_kib(address) == 0
    assert pages[:] == b"\x07" * _SIZE


def test_pages_of_a_file_are_given_back_once_enough_was_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages, address = _mapped(tmp_path)
    monkeypatch.setattr(host, "_READ_AT_A_TIME", _SIZE)
    own = host.FilePages()
    own.read(address + 100, _SIZE // 2)
    assert _resident_kib(address) >= _SIZE >> 10
    own.read(address + _SIZE // 2, _SIZE // 2)
    assert _resident_kib(address) == 0
    assert pages[:] == b"\x07" * _SIZE
    own.read(address, 1)
    own.end()
    assert 0 < _resident_kib(address) < _SIZE >> 10
    assert pages[:] == b"\x07" * _SIZE


def test_pages_that_were_written_stay(tmp_path: Path) -> None:
    pages, address = _mapped(tmp_path)
    pages[5000] = 9
    own = host.FilePages()
    own.read(address, _SIZE)
    own.end()
    assert pages[5000] == 9
    assert _resident_kib(address) >= _SIZE >> 10


def test_memory_of_no_file_is_left_alone() -> None:
    pages = mmap.mmap(-1, _SIZE)
    pages[:] = b"\x01" * _SIZE
    own = host.FilePages()
    own.read(ctypes.addressof(ctypes.c_char.from_buffer(pages)), _SIZE)
    own.end()
    assert pages[:] == b"\x01" * _SIZE


@pytest.mark.parametrize(("name", "written"), [("code.so.1", False), ("code.so", True), ("weights.bin", False)])
def test_only_pages_of_libraries_that_nobody_wrote_are_given_back(tmp_path: Path, name: str, written: bool) -> None:
    path, size = tmp_path / name, 2 << 20
    path.write_bytes(b"\x07" * size)
    with path.open("r+b") as file:
        pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    assert pages[:] == b"\x07" * size
    if written:
        pages[5000] = 9
    # As the loader leaves constants: they can be read alone.
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), mmap.PROT_READ) == 0
    host.give_back_libraries()
    if not written:
        # Where one page of a huge one was written, the system takes the others itself.
        assert (_resident_kib(address) >= size >> 10) is not name.startswith("code")
    assert pages[5000] == (9 if written else 7)
    assert pages[:5000] == b"\x07" * 5000


@pytest.mark.parametrize("library", [True, False])
def test_memory_that_another_thread_maps_meanwhile_stays(
    library: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loader maps a whole library, then its data over the end; all is looked at before that."""
    size, libc = 2 << 20, ctypes.CDLL(None)
    path = tmp_path / "code.so"
    path.write_bytes(b"\x07" * size)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    with path.open("rb") as file:
        address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_PRIVATE, file.fileno(), 0)
    looked = host._written

    def mapped_after(start: int, stop: int) -> bool:
        found = looked(start, stop)
        if start == address and not found:
            fixed = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10
            libc.mmap(address + size // 2, size // 2, mmap.PROT_READ | mmap.PROT_WRITE, fixed, -1, 0)
            ctypes.memset(address + size // 2, 9, size // 2)
        return found

    monkeypatch.setattr(host, "_written", mapped_after)
    if library:
        host.give_back_libraries()
    else:
        own = host.FilePages()
        own.read(address, size)
        own.end()
    assert ctypes.string_at(address + size // 2, 2) == b"\x09\x09"
    assert libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(size)) == 0
