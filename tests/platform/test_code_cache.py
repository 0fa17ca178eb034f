"""Compiled functions are kept on disk, and read back only where nobody else could have written them."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from beheld.platform import code_cache, jit

pytestmark = pytest.mark.skipif(not jit.available(), reason="needs llvmlite")

WORDS = ("y", "team", *jit.SHARED_WORDS)


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

    def counted(llvm: object, triple: str, first: str, texts: object) -> object:
        seen.append(first)
        return real(llvm, triple, first, texts)  # type: ignore[arg-type]

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


def test_files_are_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_cache, "_MOST", 3)
    for index in range(5):
        code_cache.write(f"{index}", b"code")
        os.utime(folder / f"{index}", (index, index))
    code_cache.write("5", b"code")
    assert sorted(file.name for file in folder.iterdir()) == ["3", "4", "5"]
