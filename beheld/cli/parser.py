"""An argument parser that suggests the nearest flag for an unknown one and fixes argparse's misreadings."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

from beheld.core.errors import ConfigError
from beheld.core.value_checks import nearest
from beheld.flags.json_values import Entries, json_value


class Parser(argparse.ArgumentParser):
    """argparse's parser without abbreviations.

    Attributes:
        any_order: positional arguments may come before, between and after the flags.
        vllm_flags: handles a flag of vLLM's server that beheld does not have, by name and value: raises ConfigError,
            returns how many words belong to the flag, or None for a flag that vLLM does not have either.
    """

    any_order = False
    vllm_flags: Callable[[str, str | None], int | None] | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **options})
        self._inner = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse like argparse, after every flag is checked."""
        if self._inner:
            return super().parse_known_args(args, namespace)
        entries = Entries()
        words = list(self._known(sys.argv[1:] if args is None else list(args), entries))
        words[:0] = entries.words()
        if not self.any_order:
            return super().parse_known_args(words, namespace)
        # parse_known_intermixed_args calls this method again, once for the flags and once for the rest.
        self._inner = True
        try:
            return self.parse_known_intermixed_args(words, namespace)
        finally:
            self._inner = False

    def error(self, message: str) -> NoReturn:
        """Print one line instead of the whole usage."""
        end = "" if message.endswith((".", "?")) else "."
        self.exit(2, f"{self.prog}: {message}{end} All flags: {self.prog} --help\n")

    def _known(self, words: Sequence[str], entries: Entries) -> Iterator[str]:
        """Return the words without `--flag.key` entries and without vLLM's extra flags, and with explicit values where
        argparse would take the next word.

        Words after a subcommand or a script belong to it and are unchanged.
        """
        place = 0
        while place < len(words):
            word = words[place]
            behind = words[place + 1] if place + 1 < len(words) else None
            place += 1
            if word == "--" or (self._hands_on() and not word.startswith("-")):
                yield word
                yield from words[place:]
                return
            if self._strange(word):
                place += self._answered(word, behind)
                continue
            if not word.startswith("--") or " " in word.partition("=")[0]:
                yield word
                continue
            name, equals, value = word.partition("=")
            action = self._option_string_actions.get(name)
            if _takes_entries(action):
                self._kept(entries.given, action.option_strings[0])
            if action is None and _takes_entries(self._behind_dots(name)):
                place += self._entry(word, behind, entries)
            elif action is None and name.replace("_", "-") in self._option_string_actions:
                # Compare with dashes and underscores treated alike.
                yield name.replace("_", "-") + equals + value
            elif action is None:
                place += self._answered(word, behind)
            elif action.nargs == "?" and name == word and not _like_a_key(behind):
                yield f"{word}=true"
            else:
                yield word

    def _strange(self, word: str) -> bool:
        """Whether the word is a short flag that this parser does not declare."""
        found = re.match(r"-[A-Za-z][\w.]*(?=$|=)", word)
        return found is not None and not {found[0], word[:2]} & set(self._option_string_actions)

    def _behind_dots(self, name: str) -> argparse.Action | None:
        """Return the flag of a `--flag.key` entry."""
        flag, dot, _ = name.partition(".")
        return self._option_string_actions.get(flag.replace("_", "-")) if dot else None

    def _entry(self, word: str, behind: str | None, entries: Entries) -> int:
        """Store the value of `--flag.key`; return how many following words it uses."""
        name, equals, value = word.partition("=")
        action = self._behind_dots(name)
        assert action is not None
        if not equals and (behind is None or behind.startswith("--")):
            self.error(f"argument {name}: expected one argument")
        text = value if equals else str(behind)
        self._kept(entries.add, action.option_strings[0], name.split(".")[1:], text)
        return 0 if equals else 1

    def _kept(self, keep: Callable[..., None], *words: Any) -> None:
        try:
            keep(*words)
        except ConfigError as error:
            self.error(str(error))

    def _hands_on(self) -> bool:
        return self._subparsers is not None or any(action.nargs == argparse.REMAINDER for action in self._actions)

    def _answered(self, word: str, behind: str | None) -> int:
        """Return how many following words an undeclared flag uses; exits with an error if the flag is unknown."""
        name, equals, value = word.partition("=")
        key, _, inside = name.removeprefix("--").partition(".")
        key = key.replace("_", "-")
        if self.vllm_flags is not None:
            free = behind if behind is not None and not behind.startswith("--") else None
            said = value if equals else free
            try:
                own = self.vllm_flags(key, json.dumps({inside: said}) if inside and said is not None else said)
            except ConfigError as error:
                self.error(str(error))
            if own is not None:
                return 0 if equals else own
        known = [flag[2:] for flag in self._option_string_actions if flag.startswith("--") and "_" not in flag]
        # The leading dashes, common to all flags, do not count as similarity.
        near = nearest(key.lstrip("-"), known).replace("'", "'--", 1)
        self.error(f"unknown flag {name}. {self._place_of(name) or near}".strip())

    def _place_of(self, name: str) -> str:
        """Return where a flag of subcommands stands; empty if it belongs to none."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                for command, parser in action.choices.items():
                    if name in parser._option_string_actions:
                        return f"It stands after a command: {self.prog} {command} {name}"
        return ""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse what is not among the choices, as argparse does, and name the nearest."""
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            near = nearest(str(value), map(str, action.choices or ()))
            raise argparse.ArgumentError(action, f"{error.message}. {near}" if near else error.message) from None


def _takes_entries(action: argparse.Action | None) -> TypeGuard[argparse.Action]:
    return action is not None and action.type is json_value


def _like_a_key(word: str | None) -> bool:
    """Whether the word after a flag with an optional value is its value, rather than a file, a URL or a question."""
    if word is None or word.startswith("hf_"):
        return word is not None
    return not word.strip() or (
        re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_-]*", word) is not None and not Path(word).exists()
    )
