"""`beheld run-vllm SCRIPT.py ARGS...`: run a script that imports vllm, unmodified; or a line of vllm's own programs."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import os
import re
import runpy
import sys
import sysconfig
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

from beheld.compat.names import PROGRAMS
from beheld.core.errors import ConfigError

_COMMAND = "from beheld.cli.main import command\ncommand()\n"
_ROOT = Path(__file__).parents[2]
# Packages whose name in an index is another than that of their import.
_DISTRIBUTIONS = {"cv2": "opencv-python-headless", "sklearn": "scikit-learn", "yaml": "pyyaml", "zmq": "pyzmq"}
_PYTHON = re.compile(r"python(3(\.\d+)?)?")
# Flags of python that change nothing here.
_WITHOUT_EFFECT = frozenset(("-u", "-B", "-E", "-I", "-s"))
# A package `vllm` that puts beheld in its place, for processes that a script starts. A program with a Python of its own
# gets the vllm of that, if it has one.
_PACKAGE = f"""import os, sys

del sys.modules[__name__]
if sys.prefix == {sys.prefix!r}:
    sys.path.append({str(_ROOT)!r})
    from beheld.compat.finder import install

    install()
else:
    sys.path.remove(os.path.dirname(os.path.dirname(__file__)))
import vllm
"""
# What is not the user's code: beheld, Python's library and installed packages.
_NOT_THEIRS = [
    Path(folder).resolve()
    for folder in (Path(__file__).parents[1], sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "-m", dest="module", metavar="MODULE", nargs=argparse.REMAINDER, help="run a module, as `python -m` does"
    )
    parser.add_argument("script", metavar="SCRIPT", nargs="?", help="a Python file that imports vllm")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="what the script is given")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the script like `python SCRIPT ARGS...`, with `import vllm` giving beheld; returns 0 at its end.

    Programs that the script starts find a command `vllm`, which is beheld, unless one of another Python is installed,
    and import beheld as `vllm`, as do the processes in which Ray runs the script's tasks on this host. A line such as
    `vllm serve MODEL` or `python -m vllm.entrypoints.openai.api_server --model MODEL` is run with `beheld run-vllm`
    before it.

    Raises:
        ConfigError: the file does not exist.
        BeheldError: an error of beheld in the script.
        Exception: any other error of the script. Of each, standard error names the lines of the user's code.
    """
    from beheld.compat.finder import install

    line = _line(arguments)
    command = _command_of(line)
    if command is not None:
        # In place of this process, so that signals reach the command. A command does not import from the folder that it
        # was called in.
        code = f"import sys\nsys.path[:] = [*filter(None, sys.path), {str(_ROOT)!r}]\n{_COMMAND}"
        os.execv(sys.executable, [sys.executable, "-c", code, *command])
    module = line[0] == "-m"
    name, *given = line[module:]
    if not module and not Path(name).is_file():
        raise ConfigError(f"There is no file {name!r}.", "Name a Python file.", param="script")
    install()
    words, folder = sys.argv, sys.path[:1]
    sys.argv = [name, *given]
    sys.path[:1] = [str(Path.cwd() if module else Path(name).resolve().parent)]
    try:
        with _command(), _package():
            if module:
                # Of a module that is not there, runpy's error is of another class.
                if importlib.util.find_spec(name) is None:
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)
                runpy.run_module(name, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(name, run_name="__main__")
    except ModuleNotFoundError as error:
        _show_places(error)
        raise _absent(error) from error
    except Exception as error:
        _show_places(error)
        _leave_ours_out(error)
        raise
    finally:
        sys.argv, sys.path[:1] = words, folder
    return 0


def _line(arguments: argparse.Namespace) -> list[str]:
    """What is run: a script or `-m` and a module, and what it is given; `python` may stand before.

    Raises:
        ConfigError: there is neither.
    """
    after = [*([] if arguments.script is None else [arguments.script]), *arguments.arguments]
    # With `-mMODULE`, argparse takes what follows for the script and its arguments.
    line = after if arguments.module is None else ["-m", *arguments.module, *after]
    if line and _names_python(line[0]):
        del line[0]
        while line and line[0] in _WITHOUT_EFFECT:
            del line[0]
    if line and line[0].startswith("-m") and line[0] != "-m":
        line[:1] = ["-m", line[0].removeprefix("-m")]
    if line in ([], ["-m"]):
        raise ConfigError("There is nothing to run.", "Name a Python file, or -m and a module.", param="script")
    return line


def _names_python(word: str) -> bool:
    """Whether a word is an interpreter and no script of that name."""
    return _PYTHON.fullmatch(Path(word).name) is not None and (os.sep in word or not Path(word).is_file())


def _command_of(line: Sequence[str]) -> list[str] | None:
    """The words of a command of beheld's that stands for one of vllm's programs; None for anything else."""
    if line[0] == "vllm" and not Path("vllm").is_file():
        return list(line[1:])
    if line[0] == "-m" and line[1] in PROGRAMS:
        return [*PROGRAMS[line[1]], *line[2:]]
    return None


@contextlib.contextmanager
def _command() -> Iterator[None]:
    """Within the block, programs find `vllm`: after all others, so that a real one goes first."""
    paths = os.environ.get("PATH", os.defpath)
    with tempfile.TemporaryDirectory(prefix="beheld-command-") as folder:
        file = Path(folder) / "vllm"
        file.write_text(f"#!{sys.executable}\n{_COMMAND}", encoding="utf-8")
        file.chmod(0o755)
        os.environ["PATH"] = f"{paths}{os.pathsep}{folder}"
        try:
            yield
        finally:
            os.environ["PATH"] = paths


@contextlib.contextmanager
def _package() -> Iterator[None]:
    """Within the block, processes that are started import beheld as `vllm`.

    Python's own processes take the variable, and Ray's take the folders in which the script looks for modules.
    """
    given = os.environ.get("PYTHONPATH")
    with tempfile.TemporaryDirectory(prefix="beheld-package-") as folder:
        package = Path(folder) / "vllm"
        package.mkdir()
        (package / "__init__.py").write_text(_PACKAGE, encoding="utf-8")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, given]))
        sys.path.append(folder)
        try:
            yield
        finally:
            # The script may have taken out either.
            sys.path[:] = [each for each in sys.path if each != folder]
            os.environ.pop("PYTHONPATH", None)
            if given is not None:
                os.environ["PYTHONPATH"] = given


def _absent(error: ModuleNotFoundError) -> ConfigError:
    """A module or name of vllm that beheld does not have, or a package that the script needs."""
    if error.name is None or error.name.split(".")[0] == "vllm":
        return ConfigError(str(error), param="import")
    package = error.name.split(".")[0]
    return ConfigError(
        f"The script imports {package!r}, which is not installed.",
        f"Install it: pip install {_DISTRIBUTIONS.get(package, package)}.",
        param="import",
    )


def _leave_ours_out(error: Exception) -> None:
    """Let the traceback that Python prints at its end begin in the script."""
    shown = sys.excepthook

    def show(kind: type[BaseException], found: BaseException, where: TracebackType | None) -> None:
        if found is error:
            where = found.__traceback__ = _from_script_on(where)
        shown(kind, found, where)

    sys.excepthook = show


def _from_script_on(where: TracebackType | None) -> TracebackType | None:
    """Return what comes after the frames in which runpy begins the script."""
    modules = [frame.f_globals.get("__name__") for frame, _ in traceback.walk_tb(where)]
    ours = modules.index(__name__) + 1
    # A script may call runpy, too.
    begin = ours + len(list(itertools.takewhile(lambda name: name == "runpy", modules[ours:])))
    for _ in range(begin):
        where = where.tb_next if where is not None else None
    return where


def _show_places(error: Exception) -> None:
    """Print one line for each place of the user's code that led to an error, the outermost first."""
    for frame in traceback.extract_tb(error.__traceback__):
        path = Path(frame.filename).resolve()
        if path.is_file() and not any(path.is_relative_to(folder) for folder in _NOT_THEIRS):
            print(f"{frame.filename}:{frame.lineno}: {frame.line}", file=sys.stderr)
