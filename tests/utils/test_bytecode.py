"""Bytecode of libraries that came without it."""

from __future__ import annotations

import marshal
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = "import beheld, torch.part; print(torch.part.answer)"
MOVED = "import beheld, os; os.chdir('elsewhere'); import torch.part; print(torch.part.answer)"
LOOSE = "import os; os.umask(0); " + SCRIPT
CHANGED = (
    """
import sys
from importlib.machinery import FileFinder, SourceFileLoader
class Loader(SourceFileLoader):
    def source_to_code(self, data, path, **_):
        return super().source_to_code(data.replace(b"42", b"77"), path)
plain = FileFinder.path_hook((Loader, [".py"]))
def hook(path):
    if "torch" not in path:
        raise ImportError(path)
    return plain(path)
sys.path_hooks.insert(0, hook)
sys.path_importer_cache.clear()
"""
    + SCRIPT
)


def run(tmp_path: Path, *, cache: str | None = None, script: str = SCRIPT, **own: str) -> str:
    """Import a library named torch in a new process that writes no bytecode; what its answer is."""
    library = tmp_path / "lib" / "torch"
    if not library.exists():
        library.mkdir(parents=True)
        (library / "__init__.py").write_text("")
        (library / "part.py").write_text("answer = 42\n")
    root = str(Path(__file__).parents[2])
    own = {"PYTHONPATH": f"{tmp_path / 'lib'}{os.pathsep}{root}", "PATH": os.environ["PATH"]} | own
    own = {"PYTHONDONTWRITEBYTECODE": "1", "BEHELD_BYTECODE_CACHE": cache or str(tmp_path / "kept")} | own
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=own, check=True, capture_output=True, text=True, cwd=tmp_path)
    return done.stdout.strip()


def kept(tmp_path: Path) -> list[Path]:
    """What was kept of the library's module."""
    return list((tmp_path / "kept").glob("**/torch/part.*"))


def test_it_is_kept_and_used_again(tmp_path: Path) -> None:
    assert run(tmp_path) == "42"
    (place,) = kept(tmp_path)
    assert not (tmp_path / "lib" / "torch" / "__pycache__").exists(), "the user did not want it there"
    assert (tmp_path / "kept").stat().st_mode & 0o77 == 0
    header = place.read_bytes()[:16]
    place.write_bytes(header + marshal.dumps(compile("answer = 43", "part.py", "exec")))
    assert run(tmp_path) == "43"
    for broken in (b"?", marshal.dumps("no code")):
        place.write_bytes(header + broken)
        assert run(tmp_path) == "42"
        assert len(place.read_bytes()) > 40, "it was not made anew"
    source = tmp_path / "lib" / "torch" / "part.py"
    before = source.stat()
    source.write_text("answer = 44\n")
    os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert run(tmp_path) == "44", "of the same size and time, as in an image whose files all bear one"
    assert kept(tmp_path) == [place], "nothing else is left"


def test_only_its_user_can_write_it(tmp_path: Path) -> None:
    assert run(tmp_path, script=LOOSE, cache=str(tmp_path / "new" / "kept")) == "42"
    made = [tmp_path / "new", *(tmp_path / "new").glob("**/*")]
    assert len(made) > 5
    assert not any(path.stat().st_mode & 0o77 for path in made)


def test_a_change_of_directory_changes_no_folder(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    assert run(tmp_path, script=MOVED, cache="kept") == "42"
    assert kept(tmp_path)
    assert not any((tmp_path / "elsewhere").iterdir())


def test_a_loader_of_others_goes_first(tmp_path: Path) -> None:
    assert run(tmp_path, script=CHANGED) == "77"


def test_bytecode_beside_a_source_counts(tmp_path: Path) -> None:
    """Of such an image a part may have it."""
    assert run(tmp_path, cache="0") == "42"
    subprocess.run([sys.executable, "-m", "py_compile", tmp_path / "lib" / "torch" / "part.py"], check=True)
    assert run(tmp_path) == "42"
    assert not kept(tmp_path)
    assert list((tmp_path / "kept").glob("**/torch/__init__.*"))


@pytest.mark.parametrize(
    "case", ["it is there", "Python may write it", "off", "others may write there", "others may exchange it", "named"]
)
def test_nothing_changes_where(case: str, tmp_path: Path) -> None:
    if case == "it is there":
        run(tmp_path, cache="0", PYTHONDONTWRITEBYTECODE="")
    if case == "others may write there":
        (tmp_path / "kept").mkdir()
        (tmp_path / "kept").chmod(0o777)
    if case == "others may exchange it":
        tmp_path.chmod(0o777)
    own = {"PYTHONDONTWRITEBYTECODE": ""} if case == "Python may write it" else {}
    own |= {"PYTHONPYCACHEPREFIX": str(tmp_path / "named")} if case == "named" else {}
    assert run(tmp_path, cache="0" if case == "off" else None, **own) == "42"
    assert not any((tmp_path / "kept").glob("**/*.pyc"))


def test_a_folder_that_cannot_be_made_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert run(tmp_path, cache=str(tmp_path / "file" / "kept")) == "42"
    before = sorted(tmp_path.iterdir())
    assert run(tmp_path, cache="~nobody-of-this-name/kept") == "42"
    assert sorted(tmp_path.iterdir()) == before
