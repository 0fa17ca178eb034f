"""`beheld chat`: a conversation in the terminal about images, videos and audio, with a server or in process."""

from __future__ import annotations

import argparse
import contextlib
import io
import shlex
import sys
from collections.abc import Iterator
from typing import Any

from beheld.cli.backends import AnswerStats, ChatBackend, LocalBackend, RemoteBackend
from beheld.cli.flags import engine_options
from beheld.cli.media import references
from beheld.cli.terminal import shown, whole
from beheld.core.errors import BeheldError, ConfigError
from beheld.core.media import MediaRef
from beheld.flags.engine import add_engine_flags
from beheld.mote import NOTHING, UNKNOWN

HELP = """/add FILE...   add images, videos or audio to the next question (files or URLs)
/new           begin a new conversation
/receipt       what the model saw of the media of the last question
/help          this
/quit          end (or Ctrl-D)
A line that ends with \\ goes on in the next. Ctrl-C stops an answer."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("media", nargs="*", metavar="MEDIA", help="files or URLs shown with the first question")
    parser.add_argument("--url", help="a server, as http://127.0.0.1:8000; without it the model runs in this process")
    parser.add_argument("--api-key", help="of that server (or OPENAI_API_KEY)")
    parser.add_argument(
        "-m", "--model", help="a folder, a GGUF file, a hub name or a short name, or the model's name at --url"
    )
    parser.add_argument("--system", help="a system message that begins every conversation")
    parser.add_argument("--max-tokens", type=int, default=512, help="longest answer, in tokens (default: 512)")
    parser.add_argument("--temperature", type=float, help="0 takes the likeliest token (default: the model's own)")
    add_engine_flags(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Chat until the input ends."""
    backend = _backend(arguments)
    try:
        ChatSession(backend, arguments.system).run(references(arguments.media))
    finally:
        backend.close()
    return 0


def _backend(arguments: argparse.Namespace) -> ChatBackend:
    options: dict[str, Any] = {"max_tokens": arguments.max_tokens}
    if arguments.temperature is not None:
        options["temperature"] = arguments.temperature
    engine = engine_options(arguments)
    if arguments.url is not None:
        if engine:
            raise ConfigError(
                f"{next(iter(engine))} is an option of an engine in this process.", "Leave it out, or leave out --url."
            )
        return RemoteBackend(arguments.url, arguments.api_key, arguments.model, options)
    if arguments.api_key is not None:
        raise ConfigError("An API key is for a server.", "Name it with --url.", param="api_key")
    from beheld.api.llm import LLM

    return LocalBackend(LLM(arguments.model, **{"max_num_seqs": 1, "use_tqdm_on_load": False, **engine}), options)


class ChatSession:
    """A conversation and its read-answer loop.

    Args:
        backend: gives the answers.
        system: the first message of every conversation, if any.
    """

    def __init__(self, backend: ChatBackend, system: str | None) -> None:
        self._backend = backend
        self._begin = [] if system is None else [{"role": "system", "content": whole(system)}]
        self._messages: list[dict[str, Any]] = list(self._begin)
        self._media: list[MediaRef] = []
        self._stats = AnswerStats()
        self._at_terminal = sys.stdin.isatty()

    def run(self, media: list[MediaRef]) -> None:
        """Read questions from standard input until it ends; only answers go to standard output."""
        self._media = media
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="surrogateescape")
        if self._at_terminal:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  (gives input() a history)
            _note(f"Chatting with {self._backend.name}; /help lists the commands.")
        for line in self._questions():
            if line.startswith("/"):
                if line.split()[0] in ("/quit", "/exit"):
                    return
                self._command(line)
            elif line.strip():
                self._ask(whole(line))

    def _questions(self) -> Iterator[str]:
        while True:
            held = ""
            while True:
                try:
                    line = input(("... " if held else "> ") if self._at_terminal else "")
                except EOFError:
                    if held:
                        yield held
                    return
                except KeyboardInterrupt:
                    if not self._at_terminal:
                        raise
                    _note("")
                    held = ""
                    continue
                held += line.removesuffix("\\") + ("\n" if line.endswith("\\") else "")
                if not line.endswith("\\"):
                    break
            yield held

    def _command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        if name == "/add":
            try:
                self._media += references(shlex.split(rest))
            except (BeheldError, ValueError) as error:
                _note(f"error: {error}")
                return
            _note(f"{len(self._media)} to be shown with the next question.")
        elif name == "/new":
            self._messages, self._media = list(self._begin), []
        elif name == "/receipt":
            for receipt in self._stats.receipts:
                _note(f"{receipt['item']}: {receipt['tokens']} tokens")
                _note(f"  given {receipt['given']}\n  seen {receipt['used']}")
        else:
            _note(HELP if name == "/help" else f"Unknown command {name}; /help lists the commands.")

    def _ask(self, text: str) -> None:
        """Ask one question and print its answer; a failed question leaves the conversation and its media unchanged."""
        try:
            parts = [*map(self._backend.part, self._media), {"type": "text", "text": text}]
        except OSError as error:
            _note(f"error: {error}")
            return
        question = {"role": "user", "content": parts}
        self._stats, said, end = AnswerStats(), "", None
        pieces = self._backend.answer([*self._messages, question], self._stats)
        try:
            for piece in pieces:
                said += piece
                sys.stdout.write(shown(piece))
                sys.stdout.flush()
        except KeyboardInterrupt:
            end = "stopped"
        except BeheldError as error:
            if said:
                print()
            _note(f"error: {error}")
            return
        finally:
            pieces.close()  # type: ignore[attr-defined]
        print()
        self._messages += [question, {"role": "assistant", "content": said}]
        self._media = []
        if said in (UNKNOWN, NOTHING):
            from beheld.tools.fits import command_for_photographs

            _note(f"note: {command_for_photographs('beheld chat -m')}")
        if self._at_terminal:
            _note(_figures(self._stats, end))
        for receipt in self._stats.receipts:
            for loss in receipt["lost"]:
                _note(f"note: {receipt['item']}: {loss}")


def _figures(stats: AnswerStats, end: str | None) -> str:
    words = []
    if stats.prompt_tokens is not None:
        words.append(f"{stats.prompt_tokens} tokens in, {stats.cached_tokens or 0} of them cached")
    if stats.answer_tokens:
        words.append(f"{stats.answer_tokens} out")
        if stats.first_s is not None and stats.answer_tokens > 1 and stats.total_s > stats.first_s:
            words.append(f"{(stats.answer_tokens - 1) / (stats.total_s - stats.first_s):.1f} tokens/s")
    if stats.first_s is not None:
        words.append(f"first after {1e3 * stats.first_s:.0f} ms")
    if end or stats.reason == "length":
        words.append(end or "cut at --max-tokens")
    return "[" + ", ".join(words) + "]"


def _note(text: str) -> None:
    print(shown(text), file=sys.stderr)
