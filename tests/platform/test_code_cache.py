"""Compiled functions are kept on disk, and read back only where nobody else could have written them."""

from __future__ import annotations

import ctypes
import errno
import os
import pwd
from collections.abc import Callable
from pathlib import Path

import pytest

from beheld.platform import code_cache, jit

pytestmark = pytest.mark.skipif(not jit.available(), reason="needs llvmlite")

WORDS = ("y", "team", *jit.SHARED_WORDS)
KEY = code_cache.key_of(["a source"])


def source(value: int) -> Callable[[str], str]:
    """A function that writes a number to where its job says, and tells how many threads run it."""

    def text(triple: str) -> str:
        return f"""
target triple = "{triple}"
define void @tell(ptr %job, i64 %first, i64 %stop) {{
  %at = load ptr, ptr %job
  store i64 {value}, ptr %at
  ret void
}}
{jit.sharing(WORDS)}"""

    return text


def told(*texts: Callable[[str], str]) -> int:
    """What the compiled function writes."""
    made = jit.CompiledModule(texts, ("tell",), WORDS)
    found = ctypes.c_int64(-1)
    made.run("tell", (ctypes.c_int64 * len(WORDS))(ctypes.addressof(found), 0, 0, 0), 1, 1)
    made.run("tell", (ctypes.c_int64 * len(WORDS))(ctypes.addressof(found), 0, 0, 0), 2, 2)
    return found.value


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that keeps the code of a test."""
    monkeypatch.setenv("BEHELD_CODE_CACHE", str(tmp_path / "own" / "code"))
    return tmp_path / "own" / "code"


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The first text of each module that LLVM compiles."""
    seen: list[str] = []
    real = jit._parsed

    def counted(llvm: object, texts: list[str]) -> object:
        seen.append(texts[0])
        return real(llvm, texts)

    monkeypatch.setattr(jit, "_parsed", counted)
    return seen


def test_code_is_compiled_once_and_read_by_later_starts(folder: Path, compilations: list[str]) -> None:
    assert [told(source(7)), told(source(7)), told(source(8)), told(source(8)), told(source(7))] == [7, 7, 8, 8, 7]
    assert len(compilations) == 2
    assert len(list(folder.iterdir())) == 2
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o600}


def test_another_cpu_or_version_compiles_its_own(
    folder: Path, compilations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import llvmlite
    import llvmlite.binding as llvm

    told(source(7))
    with monkeypatch.context() as other:
        other.setattr(llvm, "get_host_cpu_name", lambda: "x86-64")
        told(source(7))
    with monkeypatch.context() as other:
        other.setattr(llvmlite, "__version__", "0.1")
        told(source(7))
    assert len(compilations) == 3
    told(source(7))
    assert len(compilations) == 3


def test_an_older_llvm_finds_what_its_own_text_was_compiled_to(folder: Path, compilations: list[str]) -> None:
    newer = lambda triple: "define void @tell(unknown)"  # noqa: E731
    assert told(newer, source(9)) == told(newer, source(9)) == 9
    assert len(compilations) == 1
    # A later version of this program may change what older LLVMs get alone.
    assert told(newer, source(10)) == 10


@pytest.mark.parametrize("keep", [0, 10, 100])
def test_damaged_code_is_compiled_again(folder: Path, compilations: list[str], keep: int) -> None:
    told(source(7))
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[:keep])
    assert told(source(7)) == 7
    assert file.read_bytes() == whole
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert told(source(7)) == 7
    assert len(compilations) == 3


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_folder_that_others_may_write_is_not_used(folder: Path, compilations: list[str], mode: int) -> None:
    told(source(7))
    folder.chmod(mode)
    assert [told(source(7)), told(source(8))] == [7, 8]
    assert len(compilations) == 3
    assert len(list(folder.iterdir())) == 1


def test_a_file_that_others_may_write_or_that_is_a_link_is_not_read(folder: Path, compilations: list[str]) -> None:
    told(source(7))
    (file,) = folder.iterdir()
    file.chmod(0o666)
    told(source(7))
    assert len(compilations) == 2
    moved = file.rename(folder.parent / "elsewhere")
    file.symlink_to(moved)
    told(source(7))
    assert len(compilations) == 3
    assert not file.is_symlink(), "what was compiled then takes the link's place"


def test_without_a_folder_all_is_compiled(
    tmp_path: Path, compilations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder", encoding="ascii")
    for named in (code_cache.OFF, str(tmp_path / "file" / "below")):
        monkeypatch.setenv("BEHELD_CODE_CACHE", named)
        assert told(source(7)) == 7
    assert len(compilations) == 2
    assert os.listdir(tmp_path) == ["file"]


def test_files_are_bounded_and_those_of_others_stay(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_cache, "_MOST", 3)
    keys = [code_cache.key_of([str(index)]) for index in range(6)]
    folder.mkdir(parents=True)
    folder.chmod(0o700)
    # A folder that was named may have files of its own, older than all code; and a process may end while it writes.
    others = {"photo.jpg", ".profile", "beef"}
    for name in (*others, f".{keys[0]}-left_by"):
        (folder / name).touch()
        os.utime(folder / name, (0, 0))
    for index, key in enumerate(keys):
        code_cache.write(key, b"code")
        os.utime(folder / key, (index + 1, index + 1))
    assert {file.name for file in folder.iterdir()} == {*keys[3:], *others}


def test_nobody_else_can_open_a_file_while_it_is_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that has it open could change the code after it was checked."""
    seen: list[int] = []
    replace = os.replace

    def noted(source: str, target: Path) -> None:
        replace(source, target)
        seen.append(os.stat(target).st_mode & 0o777)

    opened = os.open

    def recorded(path: str, flags: int, mode: int = 0o777, **more: int) -> int:
        descriptor = opened(path, flags, mode, **more)
        if flags & os.O_CREAT:
            assert flags & os.O_EXCL
            seen.append(os.fstat(descriptor).st_mode & 0o777)
        return descriptor

    monkeypatch.setattr(os, "replace", noted)
    monkeypatch.setattr(os, "open", recorded)
    before = os.umask(0)
    try:
        code_cache.write(KEY, b"code")
    finally:
        os.umask(before)
    assert seen == [0o600, 0o600]
    assert code_cache.read(KEY) == b"code"


def test_a_full_disk_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: str, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(os, "replace", full)
        code_cache.write(KEY, b"code")
    assert not list(folder.iterdir())
    assert code_cache.read(KEY) is None


def test_without_a_home_nothing_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("BEHELD_CODE_CACHE", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    # A container may run as a user that no list has.
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    monkeypatch.chdir(tmp_path)
    code_cache.write(KEY, b"code")
    assert code_cache.read(KEY) is None
    assert not list(tmp_path.iterdir())


def test_a_folder_of_another_user_is_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code_cache.write(KEY, b"code")
    assert code_cache.read(KEY) == b"code"
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert code_cache.read(KEY) is None
    code_cache.write(code_cache.key_of(["another"]), b"code")
    assert [file.name for file in folder.iterdir()] == [KEY]
