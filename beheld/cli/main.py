"""The `beheld` command: imports only the chosen subcommand, and prints beheld's errors as one line."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import errno
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from beheld import __version__
from beheld.cli import vllm_flags
from beheld.cli.parser import Parser
from beheld.core.errors import BeheldError, ConfigError
from beheld.utils import env, standard_streams, working_directory
from beheld.utils.log import apply_level, at_terminal
from beheld.utils.roomy_stack import roomy

_COMMANDS = {
    "serve": "serve a model over HTTP with OpenAI's API, and a page to try it",
    "encode-serve": "run a model's towers for servers elsewhere, which name it in --encoder-urls",
    "chat": "talk to a model in the terminal, with a server or in this process",
    "ask": "ask a model about images, videos and audio",
    "bench": "measure a server under many clients",
    "batch": "answer a file of requests, or one question about many media files; a job that ended early resumes",
    "run-batch": "the same for files in OpenAI's batch format, with vLLM's flags",
    "plan": "print the tokens that media take and the memory that a model needs, without its weights",
    "models": "list the model families that run, those refused and why, and short names",
    "pull": "fetch a model, check its files, and tell its licence",
    "verify": "compare a model's stages with those of transformers, and name the first that differs",
    "quantize": "write a checkpoint in fewer bits, which this and other engines load",
    "doctor": "print what this machine can run, and why",
    "run-vllm": "run a script that imports vllm, unmodified",
}

# Commands whose log lines are for those who ask for them (-v), and commands whose readers expect them.
_QUIET = frozenset({"ask", "chat", "batch", "run-batch", "plan", "verify", "quantize", "doctor"})
_LOGGING = frozenset({"serve", "encode-serve", "run-vllm"})
# Commands that close everything they open and run no user code.
_CLOSED = frozenset({"ask", "serve", "encode-serve", "batch", "run-batch"})
# The device, or the user's share of it, is full.
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
# Commands whose file names may come before, between and after their flags.
_ANY_ORDER = frozenset({"ask", "batch", "verify", "quantize"})


def command() -> NoReturn:
    """The console entry point: run `main`, then end the process at once.

    A normal interpreter exit spends up to two seconds unloading torch's libraries.
    """
    status = roomy(main)()
    if not _CLOSED.intersection(sys.argv[1:2]):
        sys.exit(status)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        # The reader of standard output may have closed it.
        with contextlib.suppress(BrokenPipeError):
            if not stream.closed:
                stream.flush()
    os._exit(status)


def build_parser(only: str | None = None) -> Parser:
    """The parser of all commands: what a command line means, and what the reference of the documentation says.

    Args:
        only: the command whose line is parsed. The others have names then and no arguments, whose modules would all be
            imported.
    """
    parser = Parser(
        prog="beheld",
        description="An engine for vision-, video- and audio-language models. A model is a folder, the name of a "
        "repository of the Hugging Face hub, or a GGUF file.",
    )
    parser.add_argument("--version", action="version", version=f"beheld {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)
    for name, doc in _COMMANDS.items():
        command = commands.add_parser(name, help=doc, description=f"{doc[0].upper()}{doc[1:]}.")
        if only not in (None, name):
            continue
        _adder(name)(command)
        command.any_order = name in _ANY_ORDER
        if name in _QUIET:
            command.add_argument("-v", "--verbose", action="store_true", help="print the log on standard error")
        if name == "serve":
            command.vllm_flags = vllm_flags.answer
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit status (0 done, 1 the user's error, 2 wrong usage, 3 ours)."""
    standard_streams.ensure()
    try:
        status = _run(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
    except BeheldError as error:
        print(f"beheld: {error}", file=sys.stderr)
        return 3 if error.stage in ("engine", "step") else 1
    except KeyboardInterrupt:
        print("beheld: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader closed standard output (`beheld ask ... | head`).
        sys.stderr.close()
        return 0
    except OSError as error:
        if error.errno not in _FULL:
            raise
        # The error of a file that is open already names none, as that of standard output.
        where = "" if error.filename is None else f" ({os.fspath(error.filename)!r})"
        print(f"beheld: Cannot write{where}: {error.strerror}. Make room, or write elsewhere.", file=sys.stderr)
        standard_streams.discard_output()
        return 1
    return status


def _run(words: Sequence[str]) -> int:
    parser = build_parser(words[0] if words and words[0] in _COMMANDS else None)
    if not words:
        # Somebody looks for what there is.
        parser.print_help(sys.stderr)
        return 2
    arguments = parser.parse_args(words)
    _check_environment()
    _set_log_level(arguments)
    elsewhere = working_directory.existing()
    if elsewhere is not None:
        os.chdir(elsewhere)
    status: int = arguments.run(arguments)
    return status


def _set_log_level(arguments: argparse.Namespace) -> None:
    """Choose the level, for this process and those that it starts."""
    if arguments.command in _QUIET and arguments.verbose:
        env.set_log_level("DEBUG" if env.LOG_LEVEL() == "DEBUG" else "INFO")
    elif not env.LOG_LEVEL() and arguments.command in _QUIET:
        env.set_log_level("WARNING")
    elif not env.LOG_LEVEL() and arguments.command in _LOGGING and at_terminal():
        env.set_log_level("INFO")
    apply_level()


def _check_environment() -> None:
    """Validate the environment variables at start, not at the first request that reads one."""
    try:
        env.check()
    except ValueError as error:
        raise ConfigError(f"{error}.", "Correct or unset it.", param="environment") from error


def _adder(name: str) -> Callable[[argparse.ArgumentParser], None]:
    if name == "ask":
        from beheld.cli.ask import add_arguments
    elif name == "serve":
        from beheld.cli.serve import add_arguments
    elif name == "encode-serve":
        from beheld.cli.encode_serve import add_arguments
    elif name == "quantize":
        from beheld.cli.quantize import add_arguments
    elif name == "chat":
        from beheld.cli.chat import add_arguments
    elif name == "bench":
        from beheld.cli.bench import add_arguments
    elif name == "batch":
        from beheld.cli.batch import add_arguments
    elif name == "run-batch":
        from beheld.cli.batch import add_run_batch_arguments as add_arguments
    elif name == "models":
        from beheld.cli.models import add_arguments
    elif name == "pull":
        from beheld.cli.pull import add_arguments
    elif name == "plan":
        from beheld.cli.plan import add_arguments
    elif name == "verify":
        from beheld.cli.verify import add_arguments
    elif name == "run-vllm":
        from beheld.cli.run_vllm import add_arguments
    else:
        from beheld.cli.doctor import add_arguments
    return add_arguments


if __name__ == "__main__":
    command()
