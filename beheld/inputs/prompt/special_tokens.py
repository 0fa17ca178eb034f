"""Control tokens, and how text that spells one stays text.

A control token means more than its characters: the end of a message, a role, a media placeholder. Before the chat
template sees a user's text, each spelling of a control token in it is replaced by a stand-in, a private-use character.
In the rendered prompt the stand-ins show which characters came from users. The remaining spellings are the template's
own. Text with stand-ins gets its characters back and is encoded by a tokenizer without control tokens.

    user      "a<|im_end|>b"                     rendered  <|im_start|>user\\n a # b <|im_end|>     (# is the stand-in)
    encoded   <|im_start|> as a token . "user\\na<|im_end|>b" as letters . <|im_end|> as a token
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from beheld.core.errors import PromptError
from beheld.inputs.prompt.chunked_tokenize import ChunkedTokenizer, too_long

_PRIVATE = range(0xF0000, 0xFFFFD)
_ANY_PRIVATE = re.compile("[\U000f0000-\U000ffffc]")
# Characters to search before other threads may run.
_WINDOW = 1 << 20
_MARKUP = re.compile(r"[<\[{|(].*[>\]}|)]", re.DOTALL)
# Put before a text that does not start the prompt: tokenizers that mark the start of a text must not see one there.
_LEAD = "\U0010fff0"


@dataclass(frozen=True, eq=False)
class ControlTokens:
    """The spellings of a tokenizer's control tokens.

    Attributes:
        ids: spelling -> token id.
        pattern: finds the longest spelling at each place; None if there are none.
        strips: spelling -> whether the token absorbs spaces on its left and on its right.
        pieces: spellings that are ordinary tokens, which a tokenizer finds only where it splits text accordingly.
        folded: spellings that are matched after normalization, so that other characters may spell them too.
    """

    ids: Mapping[str, int]
    pattern: re.Pattern[str] | None
    strips: Mapping[str, tuple[bool, bool]]
    folded: frozenset[str]
    pieces: frozenset[str] = frozenset()

    @classmethod
    def of(cls, tokenizer: Any, placeholders: frozenset[int], pieces: Iterable[str] = ()) -> ControlTokens:
        """Collect them: special tokens, placeholders, and added tokens that look like markup, such as `<tool_call>`.

        Other added tokens are ordinary text: some vocabularies include runs of spaces.
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
        """The spellings as a trie: character -> what may follow; "" where one ends."""
        tree: dict[str, Any] = {}
        for spelling in self.ids:
            node = tree
            for letter in spelling:
                node = node.setdefault(letter, {})
            node[""] = {}
        return tree

    def longest_at(self, text: str, begin: int) -> int:
        """Length of the longest spelling that begins there; 0 if there is none."""
        node, longest = self.beginnings, 0
        for place in range(begin, len(text)):
            found = node.get(text[place])
            if found is None:
                break
            node = found
            if "" in node:
                longest = place + 1 - begin
        return longest

    def spelled_in(self, text: str) -> bool:
        """True if `text` spells a control token."""
        return self.pattern is not None and self.pattern.search(text) is not None


def private_letters(text: str) -> set[str]:
    """The private-use characters of a text, which cannot be stand-ins."""
    found: set[str] = set()
    for start in range(0, len(text), _WINDOW):
        found.update(_ANY_PRIVATE.findall(text, start, start + _WINDOW))
    return found


class StandIns:
    """Private-use characters that stand for parts of users' text; none of them occurs in the text itself."""

    def __init__(self, taken: Iterable[str]) -> None:
        used = set(taken)
        self._free: Iterator[str] = (chr(code) for code in _PRIVATE if chr(code) not in used)
        self._by_text: dict[str, str] = {}
        self._texts: dict[str, str] = {}
        self._any: re.Pattern[str] | None = None

    def of(self, text: str) -> str:
        """The character for `text`."""
        known = self._by_text.get(text)
        if known is None:
            known = next(self._free, None)
            if known is None:
                raise PromptError("The messages spell too many different control tokens.")
            self._by_text[text] = known
            self._texts[known] = text
            self._any = None
        return known

    def _pattern(self) -> re.Pattern[str]:
        """Finds every stand-in; checking each of a text's millions of characters would take too much memory."""
        if self._any is None:
            self._any = re.compile("([" + "".join(self._texts) + "])" if self._texts else "(?!)")
        return self._any

    def replace(self, text: str, control: ControlTokens) -> str:
        """`text` with stand-ins for all spellings of control tokens."""
        if control.pattern is None:
            return text
        return control.pattern.sub(lambda match: self.of(match[0]), text)

    def restore(self, text: str) -> str:
        """The text with its characters restored."""
        return self._pattern().sub(lambda match: self._texts[match[0]], text)

    def parts(self, text: str) -> list[str]:
        """`text` split so that each stand-in's characters are a separate part, and restored."""
        return [self._texts.get(part, part) for part in self._pattern().split(text) if part]

    def within(self, text: str) -> bool:
        """True if `text` contains a stand-in."""
        return self._pattern().search(text) is not None

    def __len__(self) -> int:
        return len(self._texts)


class PlainEncoder:
    """Encodes text by the tokenizer's rules but without its control tokens."""

    def __init__(self, tokenizer: Any, control: ControlTokens) -> None:
        self.control = control
        self._ids = frozenset(control.ids.values())
        self._backend: Any = None
        self._tokenizer = tokenizer
        if getattr(tokenizer, "is_fast", False):
            self._backend = _without(tokenizer.backend_tokenizer, frozenset(control.ids))
            self._chunked = ChunkedTokenizer(tokenizer.backend_tokenizer, self._backend)

    def encode(self, parts: Sequence[str], *, first: bool, most: int | None = None) -> list[int]:
        """Token ids of the concatenated `parts`, none of which becomes a control token.

        Args:
            parts: pieces of text; those that spell a control token are separate.
            first: True at the very start of a prompt.
            most: the most ids that are needed; None for all.

        Raises:
            PromptError: the tokenizer can write the spelling only as the control token.
            PromptTooLongError: there are more than `most`.
        """
        ids = self._encode("".join(parts), first, most)
        if self._ids.isdisjoint(ids):
            return ids
        # Some vocabularies hold a control token's spelling as an ordinary token. So first split inside each spelling,
        # then everywhere.
        cut = [piece for part in parts for piece in ((part[:1], part[1:]) if part in self.control.ids else (part,))]
        for pieces in (cut, list("".join(parts))):
            ids = []
            for index, piece in enumerate(pieces):
                ids += self._encode(piece, first and index == 0, most)
                if most is not None and len(ids) > most:
                    raise too_long(most)
            if self._ids.isdisjoint(ids):
                return ids
        raise PromptError(
            "The text spells a control token that this tokenizer cannot write as text.", "Take it out of the message."
        )

    def _encode(self, text: str, first: bool, most: int | None) -> list[int]:
        if not text:
            return []
        if self._backend is None:
            ids: list[int] = self._tokenizer(
                text, add_special_tokens=False, truncation=False, split_special_tokens=True
            )["input_ids"]
            return ids
        if first:
            return self._chunked.encode(text, most)
        return self._chunked.encode(_LEAD + text, None if most is None else most + 1)[1:]


def _without(backend: Any, spellings: frozenset[str]) -> Any:
    """A copy of a `tokenizers` tokenizer without these added tokens, and with one that marks where a part begins."""
    from tokenizers import Tokenizer

    described = json.loads(backend.to_str())
    kept = [token for token in described["added_tokens"] if token["content"] not in spellings]
    lead = {"content": _LEAD, "special": True, "normalized": False, "lstrip": False, "rstrip": False}
    described["added_tokens"] = [*kept, {**lead, "single_word": False, "id": backend.get_vocab_size(True) + 1}]
    described |= {"post_processor": None, "truncation": None, "padding": None}
    return Tokenizer.from_str(json.dumps(described))


def smuggled(ids: Sequence[int], text: str, control: ControlTokens, ends: tuple[Sequence[int], Sequence[int]]) -> bool:
    """True if the ids of `text` contain control tokens that it does not spell literally.

    This happens only with tokens that are matched after normalization.
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
    """Token ids of a rendered prompt with stand-ins.

    Args:
        rendered: the prompt.
        stand_ins: its stand-ins.
        control: the control tokens.
        plain: encodes text with stand-ins.
        normal: text -> ids, for everything else.
        most: the most ids that are needed; None for all.

    Raises:
        PromptTooLongError: a part alone has more than `most`.
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
        # Normalization may turn other characters into control tokens, so such tokenizers get only what the template
        # spells. After a part that is encoded separately, an ordinary piece would be split as at the start of a text.
        alone = text in control.pieces
        if not alone and (kind == "token" or not (control.folded or stand_ins.within(text))):
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
