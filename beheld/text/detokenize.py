"""Incremental detokenization: the pieces of text add up to what decoding everything at once gives."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

BROKEN = "\ufffd"
# A UTF-8 character has at most four bytes, and a decoder may show each byte of an incomplete one as a broken character.
_MAX_BROKEN = 4
# The longest pattern that a tokenizer's clean-up rewrites, such as " n't" and " 've"; each begins with a space.
_MAX_CLEANED = 4


@dataclass(frozen=True, eq=False)
class _Traits:
    """Properties of a tokenizer that detokenization needs.

    Attributes:
        byte_ids: ids that stand for one byte. A decoder shows a run of them as text only if the whole run is valid.
        special: ids that `skip_special_tokens` skips, with their text.
        clean: the clean-up of spaces that ends decoding, if there is one.
        last_id: the greatest id of the vocabulary; the model may have more ids, which have no text.
        texts: cached texts of single tokens.
        options: keywords that keep `decode` from cleaning up.
        inner: see _decoder_of.
        additive: whether a text is the sum of its tokens' texts, if each token has whole characters.
    """

    byte_ids: frozenset[int]
    special: dict[int, str]
    clean: Callable[[str], str] | None
    last_id: int
    texts: dict[int, str]
    options: dict[str, bool]
    inner: Any
    additive: bool


_traits: WeakKeyDictionary[Any, _Traits] = WeakKeyDictionary()


def _traits_of(tokenizer: Any) -> _Traits:
    known = _traits.get(tokenizer)
    if known is None:
        vocabulary = tokenizer.get_vocab()
        byte_tokens = (f"<0x{byte:02X}>" for byte in range(256))
        added = getattr(tokenizer, "added_tokens_decoder", {})
        byte_ids = frozenset(vocabulary[token] for token in byte_tokens if token in vocabulary)
        inner = _decoder_of(tokenizer)
        known = _traits[tokenizer] = _Traits(
            byte_ids,
            {token_id: token.content for token_id, token in added.items() if token.special},
            tokenizer.clean_up_tokenization if _cleans(tokenizer) else None,
            max((*vocabulary.values(), *added), default=-1),
            {},
            {"clean_up_tokenization_spaces": False} if _may_clean(tokenizer) else {},
            inner,
            # Its decoder joins the bytes of all tokens, whatever stands before them.
            inner is not None and not byte_ids and type(inner.decoder).__name__ == "ByteLevel",
        )
    return known


def _may_clean(tokenizer: Any) -> bool:
    return bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))


def _cleans(tokenizer: Any) -> bool:
    """True if the tokenizer's `decode` cleans up spaces.

    transformers does so on request, but for BPE only if forced.
    """
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    forced = getattr(tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False)
    return _may_clean(tokenizer) and (type(model).__name__ != "BPE" or forced)


def _decoder_of(tokenizer: Any) -> Any:
    """A function that decodes like the tokenizer before its clean-up.

    If transformers' `decode` only delegates to the tokenizers library, this calls the library directly, which takes
    less than half the time.
    """
    passes_on = getattr(type(tokenizer), "_decode", None), getattr(type(tokenizer), "decode", None)
    names = [getattr(function, "__qualname__", "") for function in passes_on]
    own = names[0] in ("TokenizersBackend._decode", "PreTrainedTokenizerFast._decode")
    return tokenizer.backend_tokenizer if own and names[1] == "PreTrainedTokenizerBase.decode" else None


def token_text(tokenizer: Any, token_id: int) -> str:
    """The text of a single token, with broken characters if it holds only a part of one."""
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
    """The cache of `token_text`, for callers in tight loops."""
    return _traits_of(tokenizer).texts


def token_bytes(tokenizer: Any, token_id: int) -> bytes:
    """The bytes of a single token, even if they are only a part of a character."""
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


def whole_characters(data: bytes) -> tuple[str, bytes]:
    """The characters that the bytes spell, and the bytes of one that they only begin.

    Raises:
        UnicodeDecodeError: they spell something else.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    text = decoder.decode(data)
    return text, decoder.getstate()[0]


def _byte_signs() -> dict[str, int]:
    """The characters of bytes in byte-level vocabularies: a printable byte is itself, others count from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + k): byte for k, byte in enumerate(others)}


_BYTE_BY_SIGN = _byte_signs()
# A byte in vocabularies with byte fallback.
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


class Detokenizer:
    """Turns one answer's token ids into text, one or several at a time.

    The texts from `push` and `finish` together equal `tokenizer.decode(ids, skip_special_tokens=...)`.

    A decoder may treat the first token of its input differently. So new tokens are decoded together with the last token
    before them that had text, and the known text is removed from the result:

        ids       [ ...  done  | context | new ]
        decoded                 <-shown-><-what push returns->

    Args:
        tokenizer: from transformers.
        skip_special_tokens: leave special tokens out of the text.
        marks: special tokens whose first occurrence is kept anyway, so that the text can be split there.
    """

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool = True, marks: Collection[str] = ()) -> None:
        traits = _traits_of(tokenizer)
        inner = traits.inner
        self._skipped = set(traits.special) if skip_special_tokens else set[int]()
        self._once = {token_id for token_id in self._skipped if traits.special[token_id] in marks}
        self._skipped -= self._once
        # Skipped tokens never reach the decoder.
        skip = skip_special_tokens and not self._once
        self._decode: Callable[[Sequence[int]], str] = (
            partial(tokenizer.decode, skip_special_tokens=skip, **traits.options)
            if inner is None
            else partial(inner.decode, skip_special_tokens=skip)
        )
        self._alone: Callable[[int], str] | None = None if inner is None else partial(token_text, tokenizer)
        self._additive, self._texts, self._tokenizer = traits.additive, traits.texts, tokenizer
        self._byte_ids, self._last_id = traits.byte_ids, traits.last_id
        self._cleaner = None if traits.clean is None else _Cleaner(traits.clean)
        self._window: list[int] = []
        self._num_context = 0
        self._num_shown = 0

    def push(self, *token_ids: int) -> str:
        """Add tokens; returns the text that is now certain, which is often empty."""
        if self._additive and len(token_ids) == 1 and self._num_context == len(self._window):
            # All before is shown, and a token of whole characters has its text for itself.
            (token_id,) = token_ids
            if token_id in self._skipped or token_id > self._last_id:
                return ""
            text = self._texts.get(token_id) or token_text(self._tokenizer, token_id)
            if BROKEN not in text and token_id not in self._once:
                return text if self._cleaner is None else self._cleaner.push(text)
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
        certain = max(len(text.rstrip(BROKEN)), len(text) - _MAX_BROKEN)
        fresh = text[self._num_shown : certain]
        if certain == len(text):
            self._move_window(len(text))
        else:
            self._num_shown = max(self._num_shown, certain)
        return fresh if self._cleaner is None else self._cleaner.push(fresh)

    def finish(self) -> str:
        """The rest of the text; do not push afterwards."""
        rest = self._decode(self._window)[self._num_shown :] if self._window else ""
        self._window = []
        return rest if self._cleaner is None else self._cleaner.push(rest) + self._cleaner.finish()

    def _move_window(self, num_shown: int) -> None:
        """All text was returned: the new tokens become the context, unless they have no text of their own."""
        new = self._window[self._num_context :]
        # Skipped tokens never get here, so the token's text does not depend on skipping.
        text = self._decode(new) if self._alone is None or len(new) > 1 else self._alone(new[0])
        if text:
            self._window = new
            num_shown = len(text)
        self._num_shown = num_shown
        self._num_context = len(self._window)


class _Cleaner:
    """Applies a tokenizer's clean-up of spaces to text in pieces."""

    def __init__(self, clean: Callable[[str], str]) -> None:
        self._clean = clean
        self._held = ""

    def push(self, text: str) -> str:
        """Add text; returns all up to the last place without a space shortly before it, which no pattern crosses."""
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
