"""Tokenizes long texts in chunks, with the same ids as the whole text, up to a limit."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from beheld.core.errors import PromptTooLongError

# What is done about a prompt that is too long. Clients look for these words.
REDUCE = "Please reduce the length of the input prompt."
# Characters that every version of Unicode classifies as letters.
_LETTER = (
    "[A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u02af\u0410-\u044f\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3]"
)
_BLANK = f"(?<={_LETTER}) (?={_LETTER})"
_BREAK = f"(?<={_LETTER})[ \\n,.\uff0c\u3002\u3001](?={_LETTER})"
# Regular expression syntax whose match depends on the text before it, or on the text's start and end.
_LOOKS_AROUND = re.compile(r"\(\?<|\\[AbBGzZK]|(?<!\[)\^|\$")
_WORD = "\u2581"
_SIZE = 1 << 15
_SAMPLE = (
    "The quick brown fox's den, (3.14159) is  not\tfar.Is it?\nNo\n\nyes \u2014 \u00e9t\u00e9 na\u00efve e\u0301 12345 "
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002\u6d4b\u8bd5\u3001\u7ed3\u675f caf\u00e9 don't we'll  XY zz "
    "\U0001f600 a_b-c/d end "
)


class ChunkedTokenizer:
    """A separate tokenizer for long texts: it never changes, so that threads need no lock, and it lets others run.

    A text is cut where the tokenizer splits it anyway, before a blank or a punctuation mark between two letters:

        ... over the lazy | dog. The quick ...        ids(a b) = ids(a) + ids(b)

    Whether this holds is derived from the tokenizer's description and then tried. If it does not hold, or a text has no
    such position, the text is tokenized as a whole, after a rough count has shown that it may fit.

    Args:
        backend: of the `tokenizers` library; unused if `own` is given.
        own: the copy to use; None makes one.
        size: characters per chunk.
        longer: what the operator can do about a text that is too long; see PromptTokenizer.
    """

    def __init__(self, backend: Any, own: Any = None, size: int = _SIZE, longer: str = "") -> None:
        described = json.loads((backend if own is None else own).to_str())
        self._backend = _copy(described) if own is None else own
        self._size = size
        self._longer = longer
        self.cut = _cut(described)
        if self.cut is not None and not self._holds(self.cut):
            self.cut = None

    def encode(self, text: str, most: int | None = None) -> list[int]:
        """Return token ids of `text`, without special tokens around it.

        Args:
            text: any text.
            most: the number of ids needed; None for all.

        Raises:
            PromptTooLongError: there are more than `most`; the rest was not read.
        """
        ids: list[int] = []
        for piece in self._pieces(text):
            if most is not None and len(piece) > 4 * self._size:
                self._check_roughly(piece, most - len(ids), most)
            ids += self._ids(piece)
            if most is not None and len(ids) > most:
                raise too_long(most, self._longer)
        return ids

    def _ids(self, text: str) -> list[int]:
        # Of this library's calls, only those for batches release the GIL.
        found: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return found

    def _check_roughly(self, piece: str, left: int, most: int) -> None:
        """Refuse a piece that cannot be cut and has far too many tokens, before all of it is tokenized.

        Tokenizing may take time that grows with the square of its length. Cut anywhere, a text has a few more tokens
        per cut than as a whole, never twice as many.
        """
        count = 0
        for start in range(0, len(piece), self._size):
            count += len(self._ids(piece[start : start + self._size]))
            if count > 2 * left + 64:
                raise too_long(most, self._longer)

    def _pieces(self, text: str) -> Iterator[str]:
        start = 0
        while self.cut is not None and len(text) - start > self._size:
            place = _first(self.cut, text, start + self._size)
            if place is None:
                break
            yield text[start:place]
            start = place
        yield text[start:]

    def last_place(self, text: str, stop: int) -> int | None:
        """Return the last position at or before `stop` where the text can be cut; None if there is none nearby."""
        if self.cut is None:
            return None
        for end in range(stop, max(0, stop - 8 * _SIZE), -_SIZE):
            found = [match.start() for match in self.cut.finditer(text, max(0, end - _SIZE), end + 1)]
            if found:
                return found[-1]
        return None

    def _holds(self, cut: re.Pattern[str]) -> bool:
        """Return whether a sample's ids equal those of its pieces, cut at every position."""
        places = [match.start() for match in cut.finditer(_SAMPLE)]
        ids: list[int] = []
        for start, stop in zip([0, *places], [*places, len(_SAMPLE)], strict=True):
            ids += self._ids(_SAMPLE[start:stop])
        return ids == self._ids(_SAMPLE)


def too_long(most: int, longer: str) -> PromptTooLongError:
    """Return the error for a text whose tokens were not counted to the end; `longer` is what the operator can do."""
    return PromptTooLongError(f"The prompt has more than {most} tokens, the limit.", REDUCE, or_engine=longer)


def _first(cut: re.Pattern[str], text: str, start: int) -> int | None:
    """Return the first cut at or after `start`; searched in small steps, because a search holds the GIL."""
    for begin in range(start, len(text), _SIZE):
        found = cut.search(text, begin, begin + _SIZE + 1)
        if found is not None:
            return found.start()
    return None


def _copy(described: Mapping[str, Any]) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_str(json.dumps({**described, "post_processor": None, "truncation": None, "padding": None}))


def _cut(described: Mapping[str, Any]) -> re.Pattern[str] | None:
    """Return the positions where a tokenizer with this description splits every text; None if none are known.

    The tokenizer merges pairs of bytes or characters only within a pre-token. Patterns without look-behind end a word
    at its last letter, whatever follows. Without a pre-tokenizer, nothing merges across a position if no token of the
    vocabulary contains it.
    """
    model = described["model"]
    if model["type"] != "BPE" or model.get("dropout"):
        return None
    steps = _steps(described.get("pre_tokenizer"), "pretokenizers")
    normal = _steps(described.get("normalizer"), "normalizers")
    plain = all(step["type"] == "NFC" for step in normal)
    blanks = all(
        step["type"] == "Replace" and step["pattern"] == {"String": " "} and step["content"] == _WORD for step in normal
    )
    if plain and _splits_words(steps):
        found = _BREAK
    elif (
        (plain or blanks)
        # Removed characters would join the blanks around them.
        and {_WORD, model["unk_token"]} <= model["vocab"].keys()
        and all(step["type"] == "Metaspace" or step.get("pattern") == {"String": " "} for step in steps)
        and not any(re.search(f"[^{_WORD} ][{_WORD} ]", token) for token in model["vocab"])
    ):
        found = _BLANK
    else:
        return None
    return None if any(_spans(token) for token in described["added_tokens"]) else re.compile(found)


def _steps(described: Mapping[str, Any] | None, name: str) -> list[Mapping[str, Any]]:
    if described is None:
        return []
    if described["type"] != "Sequence":
        return [described]
    return [inner for step in described[name] for inner in _steps(step, name)]


def _splits_words(steps: list[Mapping[str, Any]]) -> bool:
    """Return whether these pre-tokenizers end a word at its last letter."""
    words = False
    for step in steps:
        if step["type"] == "ByteLevel":
            if step["add_prefix_space"]:
                return False
            words = words or step.get("use_regex", True)
        elif step["type"] == "Split":
            pattern = step["pattern"].get("Regex", "")
            if step["invert"] or step["behavior"] != "Isolated" or _LOOKS_AROUND.search(pattern):
                return False
            words = words or "\\p{L}" in pattern
        elif step["type"] != "Digits":
            return False
    return words


def _spans(token: Mapping[str, Any]) -> bool:
    """Return whether an added token may span a position between two letters, or strip the blank there."""
    content = token["content"]
    inside = re.search(f"{_LETTER}[ \\n,.\uff0c\u3002\u3001]", content) is not None
    return inside or bool(token["rstrip"] and re.search(f"{_LETTER}$", content))
