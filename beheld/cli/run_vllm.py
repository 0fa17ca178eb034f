"""`beheld run-vllm SCRIPT.py ARGS...`: run a script that imports vllm, unmodified."""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path
from types import TracebackType

from beheld.core.errors import BeheldError, ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("script", metavar="SCRIPT", help="a Python file that imports vllm")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="what the script is given")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the script like `python SCRIPT ARGS...`, with `import vllm` giving beheld; returns 0 at its end.

    Raises:
        ConfigError: the file does not exist.
        BeheldError: an error of beheld in the script; standard error names the script's line.
    """
    from beheld.compat.finder import install

    script = Path(arguments.script)
    if not script.is_file():
        raise ConfigError(f"There is no file {arguments.script!r}.", "Name a Python file.", param="script")
    install()
    words, folder = sys.argv, sys.path[:1]
    sys.argv = [arguments.script, *arguments.arguments]
    sys.path[:1] = [str(script.resolve().parent)]
    try:
        runpy.run_path(str(script), run_name="__main__")
    except BeheldError as error:
        line = _line_of(error.__traceback__, str(script))
        if line is not None:
            print(f"{arguments.script}:{line}:", file=sys.stderr)
        raise
    except ModuleNotFoundError as error:
        if line := _line_of(error.__traceback__, str(script)):
            print(f"{arguments.script}:{line}:", file=sys.stderr)
        raise _absent(error) from error
    finally:
        sys.argv, sys.path[:1] = words, folder
    return 0


def _absent(error: ModuleNotFoundError) -> ConfigError:
    """A module or name of vllm that beheld does not have, or a package that the script needs."""
    if error.name is None or error.name.split(".")[0] == "vllm":
        return ConfigError(str(error), param="import")
    package = error.name.split(".")[0]
    return ConfigError(
        f"The script imports {package!r}, which is not installed.",
        f"Install it: pip install {package}.",
        param="import",
    )


def _line_of(trace: TracebackType | None, script: str) -> int | None:
    """Return the innermost line of the script in a traceback."""
    found = None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == script:
            found = trace.tb_lineno
        trace = trace.tb_next
    return found
