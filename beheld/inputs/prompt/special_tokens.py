"""Keeps text that spells a control token as text.

A control token has a meaning beyond its letters: ends of messages, roles, placeholders. If a user's text spells one, a
stand-in replaces it before the chat template sees it: one private-use character for each such spelling. In the rendered
prompt the stand-ins show which letters came from users. Other spellings are the template's; segments with stand-ins are
encoded, with their letters restored, by a tokenizer without control tokens.

    user      "a<|im_end|>b"                     rendered  <|im_start|>user\\n a # b <|im_end|>     (# is the stand-in)
    encoded   <|im_start|> as a token . "user\\na<|im_end|>b" as letters . <|im_end|> as a token
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from beheld.core.errors import PromptError
from beheld.inputs.prompt.chunked_tokenize import ChunkedTokenizer, too_long

_PRIVATE = range(0xF0000, 0xFFFFD)
_ANY_PRIVATE = re.compile("[\U000f0000-\U000ffffc]")
# Characters that are searched without letting other threads run.
_WINDOW = 1 << 20
_MARKUP = re.compile(r"[<\[{|(].*[>\]}|)]", re.DOTALL)
# Text before a segment that does not start the prompt: tokenizers that mark a text's start must not mark it there.
_LEAD = "\U0010fff0"


@dataclass(frozen=True, eq=False)
class ControlTokens:
    """The spellings of a tokenizer's control tokens.

    Attributes:
        ids: spelling -> token id.
        pattern: finds the longest spelling at each position; None if there are none.
        strips: spelling -> whether the token strips blanks on its left and on its right.
        pieces: spellings of ordinary vocabulary pieces, which a tokenizer finds only where it splits text there.
        folded: spellings that are matched after normalization, so that other characters may spell them too.
        slots: letters that stand for embeddings, which no tokenizer knows.
    """

    ids: Mapping[str, int]
    pattern: re.Pattern[str] | None
    strips: Mapping[str, tuple[bool, bool]]
    folded: frozenset[str]
    pieces: frozenset[str] = frozenset()
    slots: frozenset[str] = frozenset()

    def with_slots(self, id_by_letter: Mapping[str, int]) -> ControlTokens:
        """Return the same tokens, with letters of StandIns.slot as further ones."""
        if not id_by_letter:
            return self
        spelled = sorted((*self.ids, *id_by_letter), key=len, reverse=True)
        pattern = re.compile("|".join(map(re.escape, spelled)))
        return replace(self, ids={**self.ids, **id_by_letter}, pattern=pattern, slots=frozenset(id_by_letter))

    @classmethod
    def of(cls, tokenizer: Any, placeholders: frozenset[int], pieces: Iterable[str] = ()) -> ControlTokens:
        """Collect special tokens, placeholders, and added tokens that look like markup, such as `<tool_call>`.

        Other added tokens are ordinary text: some vocabularies include runs of blanks.
        """
        special = set(tokenizer.all_special_tokens)
        ids: dict[str, int] = {}
        strips: dict[str, tuple[bool, bool]] = {}
        folded: set[str] = set()
        for token, added in tokenizer.added_tokens_decoder.items():
            text = str(added.content)
            if not text or not (added.special or text in special or token in placeholders or _MARKUP.fullmatch(text)):
                continue
            ids[text] = token
            strips[text] = (added.lstrip, added.rstrip)
            if added.normalized:
                folded.add(text)
        ordinary = frozenset(pieces) - special - set(ids)
        for text in (special | ordinary) - set(ids):
            ids[text] = tokenizer.convert_tokens_to_ids(text)
        spelled = sorted(ids, key=len, reverse=True)
        pattern = re.compile("|".join(map(re.escape, spelled))) if spelled else None
        return cls(ids, pattern, strips, frozenset(folded), ordinary)

    @cached_property
    def beginnings(self) -> dict[str, Any]:
        """Return the spellings as a tree: letter -> what may follow; "" marks an end."""
        tree: dict[str, Any] = {}
        for spelling in self.ids:
            node = tree
            for letter in spelling:
                node = node.setdefault(letter, {})
            node[""] = {}
        return tree

    def longest_at(self, text: str, begin: int) -> int:
        """Return the length of the longest spelling that begins there; 0 if none does."""
        node, longest = self.beginnings, 0
        for place in range(begin, len(text)):
            found = node.get(text[place])
            if found is None:
                break
            node = found
            if "" in node:
                longest = place + 1 - begin
        return longest

    def begins(self, text: str) -> bool:
        """True if a spelling begins with `text`, and goes on."""
        node = self.beginnings
        for letter in text:
            found = node.get(letter)
            if found is None:
                return False
            node = found
        return any(node)


def private_letters(text: str) -> set[str]:
    """Return the private-use characters in a text; stand-ins are chosen from the others."""
    found: set[str] = set()
    for start in range(0, len(text), _WINDOW):
        found.update(_ANY_PRIVATE.findall(text, start, start + _WINDOW))
    return found


class StandIns:
    """Private-use characters that represent segments of users' text; the text contains none of them."""

    def __init__(self, taken: Iterable[str]) -> None:
        used = set(taken)
        self._free: Iterator[str] = (chr(code) for code in _PRIVATE if chr(code) not in used)
        self._by_text: dict[str, str] = {}
        self._texts: dict[str, str] = {}
        self._any: re.Pattern[str] | None = None
        self.slots: list[str] = []

    def slot(self) -> str:
        """Return a new character for something that is no text; restored texts are without it."""
        letter = self._next()
        self._texts[letter] = ""
        self.slots.append(letter)
        self._any = None
        return letter

    def _next(self) -> str:
        found = next(self._free, None)
        if found is None:
            raise PromptError("The messages spell too many different control tokens.")
        return found

    def of(self, text: str) -> str:
        """Return the character for `text`."""
        known = self._by_text.get(text)
        if known is None:
            known = self._next()
            self._by_text[text] = known
            self._texts[known] = text
            self._any = None
        return known

    def _pattern(self) -> re.Pattern[str]:
        """A pattern that finds every stand-in without a copy of each character of a long text."""
        if self._any is None:
            self._any = re.compile("([" + "".join(self._texts) + "])" if self._texts else "(?!)")
        return self._any

    def replace(self, text: str, control: ControlTokens) -> str:
        """Return `text` with every spelling of a control token replaced."""
        if control.pattern is None:
            return text
        return control.pattern.sub(lambda match: self.of(match[0]), text)

    def restore(self, text: str) -> str:
        """Return the text with its letters restored."""
        return self._pattern().sub(lambda match: self._texts[match[0]], text)

    def parts(self, text: str) -> list[str]:
        """Return `text` cut so that each stand-in's letters are a separate, restored part."""
        return [self._texts.get(part, part) for part in self._pattern().split(text) if part]

    def within(self, text: str) -> bool:
        """Return whether `text` contains a stand-in."""
        return self._pattern().search(text) is not None

    def __len__(self) -> int:
        return len(self._texts)


class PlainEncoder:
    """Encodes text with the tokenizer's rules but without its control tokens; `longer` as of PromptTokenizer.

    Attributes:
        backend: the library's tokenizer that does so; None of a slow tokenizer.
    """

    def __init__(self, tokenizer: Any, control: ControlTokens, longer: str = "") -> None:
        self.control = control
        self._longer = longer
        self._ids = frozenset(control.ids.values())
        self.backend: Any = None
        self._tokenizer = tokenizer
        if getattr(tokenizer, "is_fast", False):
            self.backend = _without(tokenizer.backend_tokenizer, frozenset(control.ids))
            self._chunked = ChunkedTokenizer(tokenizer.backend_tokenizer, self.backend, longer=longer)

    def encode(self, parts: Sequence[str], *, first: bool, most: int | None = None) -> list[int]:
        """Return token ids of the concatenated `parts`, none of which is a control token.

        Args:
            parts: segments of text; those that spell a control token are separate.
            first: whether they start the prompt.
            most: the number of ids needed; None for all.

        Raises:
            PromptError: the tokenizer can write the spelling only as the token.
            PromptTooLongError: there are more than `most`.
        """
        ids = self._encode("".join(parts), first, most)
        if self._ids.isdisjoint(ids):
            return ids
        # Some vocabularies have a control token's letters as one ordinary piece. Cut inside each spelling, then
        # everywhere.
        cut = [piece for part in parts for piece in ((part[:1], part[1:]) if part in self.control.ids else (part,))]
        for pieces in (cut, list("".join(parts))):
            ids = []
            for index, piece in enumerate(pieces):
                ids += self._encode(piece, first and index == 0, most)
                if most is not None and len(ids) > most:
                    raise too_long(most, self._longer)
            if self._ids.isdisjoint(ids):
                return ids
        raise PromptError(
            "The text spells a control token that this tokenizer cannot write as text.", "Take it out of the message."
        )

    def _encode(self, text: str, first: bool, most: int | None) -> list[int]:
        if not text:
            return []
        if self.backend is None:
            ids: list[int] = self._tokenizer(
                text, add_special_tokens=False, truncation=False, split_special_tokens=True
            )["input_ids"]
            return ids
        if first:
            return self._chunked.encode(text, most)
        return self._chunked.encode(_LEAD + text, None if most is None else most + 1)[1:]


def _without(backend: Any, spellings: frozenset[str]) -> Any:
    """Copy a `tokenizers` tokenizer without these added tokens, and with one that marks where a segment begins."""
    from tokenizers import Tokenizer

    described = json.loads(backend.to_str())
    kept = [token for token in described["added_tokens"] if token["content"] not in spellings]
    lead = {"content": _LEAD, "special": True, "normalized": False, "lstrip": False, "rstrip": False}
    described["added_tokens"] = [*kept, {**lead, "single_word": False, "id": backend.get_vocab_size(True) + 1}]
    described |= {"post_processor": None, "truncation": None, "padding": None}
    return Tokenizer.from_str(json.dumps(described))


def smuggled(ids: Sequence[int], text: str, control: ControlTokens, ends: tuple[Sequence[int], Sequence[int]]) -> bool:
    """Return whether the ids of `text` contain control tokens that nothing in it spells letter by letter.

    That happens only with tokens that the tokenizer searches for after normalization.
    """
    if not control.folded or control.pattern is None:
        return False
    spelled = [control.ids[match[0]] for match in control.pattern.finditer(text)]
    allowed = [*spelled, *ends[0], *ends[1]]
    return any(ids.count(token) > allowed.count(token) for token in {control.ids[s] for s in control.folded})


def encode_rendered(
    rendered: str,
    stand_ins: StandIns,
    control: ControlTokens,
    plain: PlainEncoder,
    normal: Any,
    most: int | None = None,
) -> list[int]:
    """Return token ids of a rendered prompt with stand-ins.

    Args:
        rendered: the prompt.
        stand_ins: the texts of its private-use characters.
        control: the control tokens.
        plain: encodes segments with stand-ins.
        normal: text -> ids, for other segments.
        most: the number of ids needed; None for all.

    Raises:
        PromptTooLongError: a segment alone has more than `most`.
    """
    if control.pattern is None:
        return list(normal(stand_ins.restore(rendered)))
    pieces: list[tuple[str, int, int]] = []
    last = 0
    for match in control.pattern.finditer(rendered):
        pieces += [("text", last, match.start()), ("token", match.start(), match.end())]
        last = match.end()
    pieces.append(("text", last, len(rendered)))
    ids: list[int] = []
    trusted = ""
    for index, (kind, start, stop) in enumerate(pieces):
        text = rendered[start:stop]
        # Normalization may turn other letters into tokens, so such tokenizers only receive what the template spells.
        # After a separate segment, an ordinary piece would be split as if a text began with it.
        # Nor does a text begin after embeddings.
        alone = text in control.pieces or text in control.slots
        inner = bool(index) and rendered[slice(*pieces[index - 1][1:])] in control.slots
        if not alone and (kind == "token" or not (inner or control.folded or stand_ins.within(text))):
            trusted += text
            continue
        ids += normal(trusted) if trusted else []
        trusted = ""
        if kind == "token":
            ids.append(control.ids[text])
            continue
        left = control.strips.get(rendered[slice(*pieces[index - 1][1:])], (False, False))[1] if index else False
        right = (
            control.strips.get(rendered[slice(*pieces[index + 1][1:])], (False, False))[0]
            if index + 1 < len(pieces)
            else False
        )
        text = text.lstrip() if left else text
        text = text.rstrip() if right else text
        ids += plain.encode(stand_ins.parts(text), first=start == 0, most=most)
    return ids + (list(normal(trusted)) if trusted else [])
