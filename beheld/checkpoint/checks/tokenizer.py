"""What the files of a tokenizer and the chat templates may say: nothing that makes much of little text."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from beheld.checkpoint.checks.entries import refused
from beheld.checkpoint.files import CHAT_TEMPLATE, TOKENIZER, TOKENIZER_CONFIG, read_json
from beheld.core.errors import ModelError

# Unicode's own compatibility forms make 18 letters of one.
_MAX_GROWTH = 32
_MAX_ADDED = 64
_MAX_PATTERN = 16_384
_MAX_TEMPLATE = 1 << 20
_MAX_PADDING = 1 << 20
_UNBOUNDED = re.compile(r"[*+]|\{\d*,\}")


def check_tokenizer(folder: Path) -> None:
    """Check tokenizer.json, tokenizer_config.json and the files of chat templates, as far as they are there.

    Raises:
        ModelError: it names the file and the key.
    """
    _check_pipeline(read_json(folder / TOKENIZER))
    said = read_json(folder / TOKENIZER_CONFIG)
    _check_template(TOKENIZER_CONFIG, said.get("chat_template"))
    _check_template(CHAT_TEMPLATE, read_json(folder / CHAT_TEMPLATE).get("chat_template"))
    for file in (folder / "chat_template.jinja", *folder.glob("additional_chat_templates/*.jinja")):
        if file.is_file() and file.stat().st_size > _MAX_TEMPLATE:
            raise ModelError(f"{file.name} is larger than {_MAX_TEMPLATE >> 20} MiB.", "Give another chat_template.")


def _check_template(file: str, value: Any) -> None:
    named = value if isinstance(value, list) else [{"name": "", "template": value}]
    for entry in named:
        template = entry.get("template") if isinstance(entry, Mapping) else entry
        if template is not None and (not isinstance(template, str) or len(template) > _MAX_TEMPLATE):
            raise refused(file, "chat_template", template, f"a text of at most {_MAX_TEMPLATE} letters")
        if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
            raise refused(file, "chat_template", entry, "a text, or a list of objects with name and template")


def _check_pipeline(raw: Mapping[str, Any]) -> None:
    growth = 1.0
    for where, step in _steps(raw.get("normalizer"), "normalizer"):
        growth *= max(1.0, _growth(where, step))
        if growth > _MAX_GROWTH:
            raise refused(TOKENIZER, where, step, f"a step that makes at most {_MAX_GROWTH} letters of one")
    for name in ("normalizer", "pre_tokenizer"):
        for where, step in _steps(raw.get(name), name):
            _check_pattern(where, step.get("pattern"))
    padding = raw.get("padding")
    strategy = padding.get("strategy") if isinstance(padding, Mapping) else None
    fixed = strategy.get("Fixed") if isinstance(strategy, Mapping) else None
    if fixed is not None and (not isinstance(fixed, int) or fixed > _MAX_PADDING):
        raise refused(TOKENIZER, "padding.strategy.Fixed", fixed, f"at most {_MAX_PADDING}")
    added = raw.get("added_tokens")
    for token in added if isinstance(added, list) else ():
        number = token.get("id") if isinstance(token, Mapping) else None
        if not isinstance(number, int) or not isinstance(token.get("content"), str) or not token["content"]:
            raise refused(TOKENIZER, "added_tokens", token, "an object with id and content")


def _steps(part: Any, where: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The steps of a normalizer or pre-tokenizer; sequences of them are taken apart."""
    if not isinstance(part, Mapping):
        return
    yield where, part
    for name in ("normalizers", "pretokenizers"):
        inner = part.get(name)
        for number, step in enumerate(inner if isinstance(inner, list) else ()):
            yield from _steps(step, f"{where}.{name}[{number}]")


def _growth(where: str, step: Mapping[str, Any]) -> float:
    """How many letters one may become."""
    kind = step.get("type")
    if kind == "Prepend":
        added = step.get("prepend")
        if isinstance(added, str) and len(added) > _MAX_ADDED:
            raise refused(TOKENIZER, f"{where}.prepend", added, f"at most {_MAX_ADDED} letters")
    if kind == "Replace":
        content, pattern = step.get("content"), step.get("pattern")
        literal = pattern.get("String") if isinstance(pattern, Mapping) else None
        if isinstance(content, str):
            return len(content) / max(1, len(literal) if isinstance(literal, str) else 1)
    if kind == "Precompiled":
        return _longest_form(where, step.get("precompiled_charsmap"))
    return 1.0


def _longest_form(where: str, charsmap: Any) -> float:
    """The longest text that a character map of sentencepiece has in place of a character.

    | bytes of the trie, little-endian, 4 bytes | trie | texts, each ended by a zero byte |
    """
    try:
        data = base64.b64decode(charsmap or "", validate=True)
    except (binascii.Error, TypeError, ValueError) as error:
        raise refused(TOKENIZER, f"{where}.precompiled_charsmap", charsmap, "base64") from error
    texts = data[4 + int.from_bytes(data[:4], "little") :]
    return max((len(text.decode(errors="replace")) for text in texts.split(b"\0")), default=0)


def _check_pattern(where: str, pattern: Any) -> None:
    """Refuse patterns in which what repeats without bound is itself repeated without bound: they may take for ever."""
    text = pattern.get("Regex") if isinstance(pattern, Mapping) else None
    if not isinstance(text, str):
        return
    if len(text) > _MAX_PATTERN or _nests(text):
        wanted = f"a pattern of at most {_MAX_PATTERN} letters that repeats nothing that repeats"
        raise refused(TOKENIZER, f"{where}.pattern.Regex", text, wanted)


def _nests(pattern: str) -> bool:
    """True if a group with an unbounded repetition inside is repeated without bound, as in (a+)+."""
    open_groups: list[bool] = []
    inside = False  # of the innermost group: something repeats without bound
    place = 0
    while place < len(pattern):
        letter = pattern[place]
        if letter == "\\":
            place += 2
        elif letter == "[":
            place = _class_end(pattern, place)
        elif letter == "(":
            open_groups.append(inside)
            inside = False
            place += 1
            continue
        elif letter == ")":
            repeats, place = inside, place + 1
            if repeats and _UNBOUNDED.match(pattern, place):
                return True
            inside = repeats or (open_groups.pop() if open_groups else False)
            continue
        else:
            place += 1
        if _UNBOUNDED.match(pattern, place):
            inside = True
    return False


def _class_end(pattern: str, place: int) -> int:
    """The place after the character class that begins at `place`; classes may hold others."""
    depth = 0
    while place < len(pattern):
        letter = pattern[place]
        if letter == "\\":
            place += 2
            continue
        depth += (letter == "[") - (letter == "]")
        place += 1
        if depth == 0:
            break
    return place
