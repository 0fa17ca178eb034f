"""Incremental detokenising: text as it becomes certain, which adds up to what decoding everything at once gives."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

_BROKEN = "\ufffd"
# A character of UTF-8 has four bytes, and a decoder may show each byte of an unfinished one as a broken character.
_MAX_BROKEN = 4
# The longest pattern that a tokenizer's clean-up rewrites, as in " n't" and " 've"; each begins with a space.
_MAX_CLEANED = 4


@dataclass(frozen=True, eq=False)
class _Traits:
    """What must be known of a tokenizer.

    Attributes:
        byte_ids: ids that stand for one byte. Decoders show a run of them as text only if the whole run is text.
        special: ids that `skip_special_tokens` skips, and what they spell.
        clean: its clean-up of spaces, if decoding ends with one.
        last_id: the greatest id of its vocabulary; a model's may be larger, and what lies beyond has no text.
        texts: decoded single tokens, as they were asked for.
        options: keywords for its `decode` that keep it from cleaning up.
        inner: see _decoder_of.
    """

    byte_ids: frozenset[int]
    special: dict[int, str]
    clean: Callable[[str], str] | None
    last_id: int
    texts: dict[int, str]
    options: dict[str, bool]
    inner: Any


_traits: WeakKeyDictionary[Any, _Traits] = WeakKeyDictionary()


def _traits_of(tokenizer: Any) -> _Traits:
    known = _traits.get(tokenizer)
    if known is None:
        vocabulary = tokenizer.get_vocab()
        byte_tokens = (f"<0x{byte:02X}>" for byte in range(256))
        added = getattr(tokenizer, "added_tokens_decoder", {})
        known = _traits[tokenizer] = _Traits(
            frozenset(vocabulary[token] for token in byte_tokens if token in vocabulary),
            {token_id: token.content for token_id, token in added.items() if token.special},
            tokenizer.clean_up_tokenization if _cleans(tokenizer) else None,
            max((*vocabulary.values(), *added), default=-1),
            {},
            {"clean_up_tokenization_spaces": False} if _may_clean(tokenizer) else {},
            _decoder_of(tokenizer),
        )
    return known


def _may_clean(tokenizer: Any) -> bool:
    return bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))


def _cleans(tokenizer: Any) -> bool:
    """True if the tokenizer's `decode` cleans up spaces: transformers does so on demand, but for BPE only if forced."""
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    forced = getattr(tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False)
    return _may_clean(tokenizer) and (type(model).__name__ != "BPE" or forced)


def _decoder_of(tokenizer: Any) -> Any:
    """What decodes as the tokenizer does before its clean-up. Where transformers' `decode` only passes on to the
    tokenizers library, that is asked itself, which takes less than half the time."""
    passes_on = getattr(type(tokenizer), "_decode", None), getattr(type(tokenizer), "decode", None)
    names = [getattr(function, "__qualname__", "") for function in passes_on]
    own = names[0] in ("TokenizersBackend._decode", "PreTrainedTokenizerFast._decode")
    return tokenizer.backend_tokenizer if own and names[1] == "PreTrainedTokenizerBase.decode" else None


def token_text(tokenizer: Any, token_id: int) -> str:
    """The text of one token by itself; broken characters where it holds only a part of one."""
    traits = _traits_of(tokenizer)
    text = traits.texts.get(token_id)
    if text is None:
        if traits.inner is None:
            text = tokenizer.decode([token_id], **traits.options)
        else:
            text = traits.inner.decode([token_id], skip_special_tokens=False)
        traits.texts[token_id] = text
    return text


def known_texts(tokenizer: Any) -> dict[int, str]:
    """Texts of single tokens, as far as `token_text` has made them; for callers that ask very often."""
    return _traits_of(tokenizer).texts


def token_bytes(tokenizer: Any, token_id: int) -> bytes:
    """The bytes of one token by itself, also where they are a part of a character, which no text can show."""
    text = token_text(tokenizer, token_id)
    if "\ufffd" not in text:
        return text.encode()
    entry = str(tokenizer.convert_ids_to_tokens(token_id))
    spelt = _BYTE_TOKEN.fullmatch(entry)
    if spelt:
        return bytes([int(spelt[1], 16)])
    if all(sign in _BYTE_BY_SIGN for sign in entry):
        return bytes(_BYTE_BY_SIGN[sign] for sign in entry)
    return text.encode()


def _byte_signs() -> dict[str, int]:
    """Byte-level vocabularies write every byte as one sign: itself where it is printable, else the next one from
    U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + k): byte for k, byte in enumerate(others)}


_BYTE_BY_SIGN = _byte_signs()
# How vocabularies with byte fallback write a byte.
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


class Detokenizer:
    """Turns one answer's token ids into text, one or some at a time.

    The texts returned by `push` and `finish` together equal `tokenizer.decode(ids, skip_special_tokens=...)`.

    A decoder may treat the first token of what it is given in a special way, so a new token is decoded together with
    the one before it that showed any text, and the text that was known already is cut off:

        ids       [ ...  done  | context | new ]
        decoded                 <-shown-><-what push returns->

    Args:
        tokenizer: of transformers.
        skip_special_tokens: special tokens show nothing.
        marks: special tokens that are shown all the same where they come first, so that a text can be divided there.
    """

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool = True, marks: Collection[str] = ()) -> None:
        traits = _traits_of(tokenizer)
        inner = traits.inner
        self._skipped = set(traits.special) if skip_special_tokens else set[int]()
        self._once = {token_id for token_id in self._skipped if traits.special[token_id] in marks}
        self._skipped -= self._once
        # Nothing that is skipped gets as far as the decoder.
        skip = skip_special_tokens and not self._once
        self._decode: Callable[[Sequence[int]], str] = (
            partial(tokenizer.decode, skip_special_tokens=skip, **traits.options)
            if inner is None
            else partial(inner.decode, skip_special_tokens=skip)
        )
        self._alone: Callable[[int], str] | None = None if inner is None else partial(token_text, tokenizer)
        self._byte_ids, self._last_id = traits.byte_ids, traits.last_id
        self._cleaner = None if traits.clean is None else _Cleaner(traits.clean)
        self._window: list[int] = []
        self._num_context = 0
        self._num_shown = 0

    def push(self, *token_ids: int) -> str:
        """The text that has become certain with these tokens; often empty."""
        shown = False
        for token_id in token_ids:
            if token_id in self._skipped or token_id > self._last_id:
                continue
            if token_id in self._once:
                self._skipped.add(token_id)
            self._window.append(token_id)
            shown = True
        if not shown or self._window[-1] in self._byte_ids:
            return ""
        text = self._decode(self._window)
        certain = max(len(text.rstrip(_BROKEN)), len(text) - _MAX_BROKEN)
        fresh = text[self._num_shown : certain]
        if certain == len(text):
            self._move_window(len(text))
        else:
            self._num_shown = max(self._num_shown, certain)
        return fresh if self._cleaner is None else self._cleaner.push(fresh)

    def finish(self) -> str:
        """The rest of the text, as it is; nothing may be pushed after this."""
        rest = self._decode(self._window)[self._num_shown :] if self._window else ""
        self._window = []
        return rest if self._cleaner is None else self._cleaner.push(rest) + self._cleaner.finish()

    def _move_window(self, num_shown: int) -> None:
        """Everything is shown: the new tokens become the context, unless they show nothing by themselves."""
        new = self._window[self._num_context :]
        # Tokens that are skipped have never come here, so that this one's text is the same whether they are or not.
        text = self._decode(new) if self._alone is None or len(new) > 1 else self._alone(new[0])
        if text:
            self._window = new
            num_shown = len(text)
        self._num_shown = num_shown
        self._num_context = len(self._window)


class _Cleaner:
    """A tokenizer's clean-up of spaces, applied to text in pieces."""

    def __init__(self, clean: Callable[[str], str]) -> None:
        self._clean = clean
        self._held = ""

    def push(self, text: str) -> str:
        """What is certain: all up to the last place without a space shortly before it: no pattern reaches across."""
        held = self._held + text
        reach = _MAX_CLEANED - 1
        cut = len(held)
        while cut > 0 and (cut < reach or " " in held[cut - reach : cut]):
            cut -= 1
        self._held = held[cut:]
        return self._clean(held[:cut])

    def finish(self) -> str:
        """The rest."""
        rest, self._held = self._held, ""
        return self._clean(rest)
