"""FlexibleArgumentParser: argparse that understands dashes and underscores alike, and options from a YAML file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any


class FlexibleArgumentParser(argparse.ArgumentParser):
    """An argparse parser that treats `--max_model_len` and `--max-model-len` as the same option.

    `--config FILE` reads a YAML mapping of options, which those of the command line override, unless the script
    declares a `--config` of its own.
    """

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse like argparse, after each option is rewritten to its declared spelling."""
        words = list(sys.argv[1:] if args is None else args)
        if "--config" not in self._option_string_actions:
            words = self._with_file(words)
        return super().parse_known_args(list(self._spelled(words)), namespace)

    def _spelled(self, words: Iterable[str]) -> Iterator[str]:
        """Return the words with each long option in its declared spelling; words after a bare `--` are unchanged."""
        words = iter(words)
        for word in words:
            if word == "--":
                yield word
                yield from words
                return
            yield self._declared(word)

    def _declared(self, word: str) -> str:
        name, equals, value = word.partition("=")
        known = self._option_string_actions
        if not name.startswith("--") or name in known:
            return word
        plain = _plain(name)
        same = [option for option in known if option.startswith("--") and _plain(option) == plain]
        if not same and self.allow_abbrev:
            longer = [option for option in known if option.startswith("--") and _plain(option).startswith(plain)]
            same = longer if len(longer) == 1 else []
        return same[0] + equals + value if same else word

    def _with_file(self, words: list[str]) -> list[str]:
        """Return the words, preceded by the options of the file that --config names."""
        for index, word in enumerate(words):
            if word == "--":
                return words
            name, equals, value = word.partition("=")
            if name != "--config":
                continue
            if not equals and index + 1 >= len(words):
                self.error("argument --config: expected a file")
            path = value if equals else words[index + 1]
            rest = words[:index] + words[index + (1 if equals else 2) :]
            return self._of_file(Path(path)) + rest
        return words

    def _of_file(self, path: Path) -> list[str]:
        import yaml

        try:
            values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        except (OSError, ValueError, yaml.YAMLError) as error:
            self.error(f"argument --config: {path} cannot be read as YAML ({type(error).__name__})")
        if not isinstance(values, dict):
            self.error(f"argument --config: {path} is not a mapping of options")
        words: list[str] = []
        for name, value in values.items():
            flag = f"--{name}"
            if isinstance(value, bool):
                words += self._switch(flag, value)
            elif isinstance(value, list):
                words += [flag, *(str(entry) for entry in value)]
            elif value is not None:
                words += [flag, str(value)]
        return words

    def _switch(self, flag: str, value: bool) -> list[str]:
        """Turn a switch on or off. A switch that is off by default needs no flag; an undeclared one is reported."""
        known = {_plain(option) for option in self._option_string_actions}
        negated = f"--no-{flag.removeprefix('--')}"
        if value or _plain(flag) not in known:
            return [flag]
        return [negated] if _plain(negated) in known else []


def _plain(option: str) -> str:
    return option.replace("_", "-")
