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
_MAX_TOKEN = 1 << 14
# Parts of a tokenizer, and what lists their steps.
PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_LISTS = ("normalizers", "pretokenizers", "processors", "decoders")
_UNBOUNDED = re.compile(r"[*+]|\{\d*,\}")


def check_tokenizer(folder: Path) -> None:
    """Check tokenizer.json, tokenizer_config.json and the files of chat templates, as far as they are there.

    Raises:
        ModelError: it names the file and the key.
    """
    raw = read_json(folder / TOKENIZER)
    check_parts(TOKENIZER, raw)
    _check_entries(raw)
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


def check_parts(file: str, raw: Mapping[str, Any]) -> None:
    """Check the parts of a tokenizer that `raw` has, as tokenizer.json describes them.

    Args:
        file: where they come from.
        raw: name of the part -> its description.

    Raises:
        ModelError: one makes much of little text, or may take for ever.
    """
    for name in ("normalizer", "decoder"):
        growth = 1.0
        for where, step in _steps(raw.get(name), name):
            growth *= max(1.0, _growth(file, where, step))
            if growth > _MAX_GROWTH:
                raise refused(file, where, step, f"a step that makes at most {_MAX_GROWTH} letters of one")
    for name in PARTS:
        for where, step in _steps(raw.get(name), name):
            _check_pattern(file, where, step.get("pattern"))
            _check_around(file, where, step)


def _check_entries(raw: Mapping[str, Any]) -> None:
    padding = raw.get("padding")
    given = padding if isinstance(padding, Mapping) else {}
    strategy = given.get("strategy")
    fixed = strategy.get("Fixed") if isinstance(strategy, Mapping) else None
    for name, value in (("strategy.Fixed", fixed), ("pad_to_multiple_of", given.get("pad_to_multiple_of"))):
        if value is not None and (not isinstance(value, int) or value > _MAX_PADDING):
            raise refused(TOKENIZER, f"padding.{name}", value, f"at most {_MAX_PADDING}")
    added = raw.get("added_tokens")
    for token in added if isinstance(added, list) else ():
        number = token.get("id") if isinstance(token, Mapping) else None
        if not isinstance(number, int) or not isinstance(token.get("content"), str) or not token["content"]:
            raise refused(TOKENIZER, "added_tokens", token, "an object with id and content")
        _check_token("added_tokens", token["content"])
    model = raw.get("model")
    vocabulary = model.get("vocab") if isinstance(model, Mapping) else None
    if isinstance(vocabulary, Mapping):
        _check_token("model.vocab", max(vocabulary, key=len, default=""))
    elif isinstance(vocabulary, list):
        texts = (entry[0] for entry in vocabulary if isinstance(entry, list) and entry and isinstance(entry[0], str))
        _check_token("model.vocab", max(texts, key=len, default=""))


def _check_token(where: str, text: str) -> None:
    if len(text) > _MAX_TOKEN:
        raise refused(TOKENIZER, where, text, f"tokens of at most {_MAX_TOKEN} letters")


def _check_around(file: str, where: str, step: Mapping[str, Any]) -> None:
    """Refuse a template that has the text more than twice, or much around it: | token | text | token |."""
    for name in ("single", "pair"):
        pieces = step.get(name)
        texts: dict[str, int] = {}
        for piece in pieces if isinstance(pieces, list) else ():
            inner = piece.get("Sequence") if isinstance(piece, Mapping) else None
            if isinstance(inner, Mapping):
                texts[str(inner.get("id"))] = texts.get(str(inner.get("id")), 0) + 1
        if isinstance(pieces, list) and (len(pieces) > _MAX_ADDED or max(texts.values(), default=0) > 2):
            wanted = f"at most {_MAX_ADDED} pieces, with each text at most twice"
            raise refused(file, f"{where}.{name}", pieces, wanted)
    tokens = step.get("special_tokens")
    for name, token in tokens.items() if isinstance(tokens, Mapping) else ():
        ids = token.get("ids") if isinstance(token, Mapping) else None
        if isinstance(ids, list) and len(ids) > _MAX_ADDED:
            raise refused(file, f"{where}.special_tokens.{name[:_MAX_ADDED]}", ids, f"at most {_MAX_ADDED} ids")


def _steps(part: Any, where: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The steps of a part; sequences of them are taken apart."""
    if not isinstance(part, Mapping):
        return
    yield where, part
    for name in _LISTS:
        inner = part.get(name)
        for number, step in enumerate(inner if isinstance(inner, list) else ()):
            yield from _steps(step, f"{where}.{name}[{number}]")


def _growth(file: str, where: str, step: Mapping[str, Any]) -> float:
    """How many letters one may become."""
    kind = step.get("type")
    if kind == "Prepend":
        added = step.get("prepend")
        if isinstance(added, str) and len(added) > _MAX_ADDED:
            raise refused(file, f"{where}.prepend", added, f"at most {_MAX_ADDED} letters")
    if kind == "Replace":
        content, pattern = step.get("content"), step.get("pattern")
        literal = pattern.get("String") if isinstance(pattern, Mapping) else None
        if isinstance(content, str):
            return len(content) / max(1, len(literal) if isinstance(literal, str) else 1)
    if kind == "Precompiled":
        return _longest_form(file, where, step.get("precompiled_charsmap"))
    return 1.0


def _longest_form(file: str, where: str, charsmap: Any) -> float:
    """The longest text that a character map of sentencepiece has in place of a character.

    | bytes of the trie, little-endian, 4 bytes | trie | texts, each ended by a zero byte |
    """
    try:
        data = base64.b64decode(charsmap or "", validate=True)
    except (binascii.Error, TypeError, ValueError) as error:
        raise refused(file, f"{where}.precompiled_charsmap", charsmap, "base64") from error
    texts = data[4 + int.from_bytes(data[:4], "little") :]
    return max((len(text.decode(errors="replace")) for text in texts.split(b"\0")), default=0)


def _check_pattern(file: str, where: str, pattern: Any) -> None:
    """Refuse patterns in which what repeats without bound is itself repeated without bound: they may take for ever."""
    text = pattern.get("Regex") if isinstance(pattern, Mapping) else None
    if not isinstance(text, str):
        return
    if len(text) > _MAX_PATTERN or _nests(text):
        wanted = f"a pattern of at most {_MAX_PATTERN} letters that repeats nothing that repeats"
        raise refused(file, f"{where}.pattern.Regex", text, wanted)


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
