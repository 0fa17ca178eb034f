"""Bytecode of libraries that came without it."""

from __future__ import annotations

import marshal
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = "import beheld, torch.part; print(torch.part.answer)"


def run(tmp_path: Path, *, cache: str | None = None, **own: str) -> str:
    """Import a library named torch in a new process that writes no bytecode; what its answer is."""
    library = tmp_path / "lib" / "torch"
    if not library.exists():
        library.mkdir(parents=True)
        (library / "__init__.py").write_text("")
        (library / "part.py").write_text("answer = 42\n")
    root = str(Path(__file__).parents[2])
    own = {"PYTHONPATH": f"{tmp_path / 'lib'}{os.pathsep}{root}", "PATH": os.environ["PATH"]} | own
    own = {"PYTHONDONTWRITEBYTECODE": "1", "BEHELD_BYTECODE_CACHE": cache or str(tmp_path / "kept")} | own
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=own, check=True, capture_output=True, text=True)
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
    # Cut off, say.
    place.write_bytes(header + b"?")
    assert run(tmp_path) == "42"
    assert len(place.read_bytes()) > 20, "it was not made anew"
    (tmp_path / "lib" / "torch" / "part.py").write_text("answer = 4 + 40\n")
    assert run(tmp_path) == "44"


def test_bytecode_beside_a_source_counts(tmp_path: Path) -> None:
    """Of such an image a part may have it."""
    assert run(tmp_path, cache="0") == "42"
    subprocess.run([sys.executable, "-m", "py_compile", tmp_path / "lib" / "torch" / "part.py"], check=True)
    assert run(tmp_path) == "42"
    assert not kept(tmp_path)
    assert list((tmp_path / "kept").glob("**/torch/__init__.*"))


@pytest.mark.parametrize("case", ["it is there", "Python may write it", "off", "others may write there", "named"])
def test_nothing_changes_where(case: str, tmp_path: Path) -> None:
    if case == "it is there":
        run(tmp_path, cache="0", PYTHONDONTWRITEBYTECODE="")
    if case == "others may write there":
        (tmp_path / "kept").mkdir()
        (tmp_path / "kept").chmod(0o777)
    own = {"PYTHONDONTWRITEBYTECODE": ""} if case == "Python may write it" else {}
    own |= {"PYTHONPYCACHEPREFIX": str(tmp_path / "named")} if case == "named" else {}
    assert run(tmp_path, cache="0" if case == "off" else None, **own) == "42"
    assert not any((tmp_path / "kept").glob("**/*.pyc"))


def test_a_folder_that_cannot_be_made_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert run(tmp_path, cache=str(tmp_path / "file" / "kept")) == "42"
